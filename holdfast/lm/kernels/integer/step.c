/* The order of a step's work, and how threads share it (step.h has the arithmetic).

Work is cut into phases. Within a phase each thread takes the next piece of work until none is left, and goes on once all
pieces are done. So a thread that another program keeps from running delays the others only if it has a piece. A thread
that waits for long sleeps: systems let one that slept run soon, and not one that spun. */

#define _GNU_SOURCE
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "rounded.h"
#include "threads.h"

enum { PAD = 16, LINES = 128, SPINS = 2000, LEAST_COLUMNS = 64, MOST_COLUMNS = 1024 };

struct phase {
    atomic_int_fast64_t next;  /* the next piece of work */
    atomic_int done, sleepers; /* the number of pieces that are done, and whether a thread sleeps until all are */
    char apart[LINES - sizeof(atomic_int_fast64_t) - 2 * sizeof(atomic_int)];
};

struct place {  /* activations in float32, in the scratch memory; rows are PAD apart, so that they differ in cache sets */
    float *stream, *x, *qkv, *attended, *added, *inner, *turns, *low, *own;
    void *rounded;              /* what the current product reads, in 8 bits */
    int64_t own_size;           /* numbers of each thread's own part */
    struct phase *phases;
};

struct team {
    const struct kernels *kernels;
    const struct decoder *d;
    const struct step *s;
    struct place at;
    atomic_int members;
    atomic_bool failed;
    int threads;
};

struct member {
    struct team *team;
    float *own;
    int64_t phase;
    bool has_piece;
};

/* With the rounding before each product, and the first half of its adapters. */
enum { PHASES_OF_LAYER = 12 + PROJECTIONS, OTHER_PHASES = 4 };

static int64_t stride_of(int64_t width) { return (width + PAD - 1) / PAD * PAD + PAD; }

static int64_t widest(const struct decoder *d) { return (d->heads + 2 * d->kv_heads) * d->dim; }

static int64_t most_inputs(const struct decoder *d)
{
    const int64_t most = d->hidden > d->inner ? d->hidden : d->inner;
    return most > d->heads * d->dim ? most : d->heads * d->dim;
}

static int64_t own_size(const struct decoder *d, const struct step *s)
{
    const int64_t scores = d->heads / d->kv_heads * s->longest, columns = 2 * s->rows * MOST_COLUMNS;
    return ((scores > columns ? scores : columns) + PAD - 1) / PAD * PAD + MOST_COLUMNS;  /* the last for adapters */
}

static int64_t phases_of(const struct decoder *d) { return d->count * PHASES_OF_LAYER + OTHER_PHASES; }

/* Divide the scratch memory. Returns its size in numbers. */
static int64_t divide(const struct decoder *d, const struct step *s, int threads, struct place *at)
{
    int64_t used = 0;
    float *base = s->scratch;
    const int64_t hidden = stride_of(d->hidden), widths[] = {hidden, hidden, stride_of(widest(d)),
        stride_of(d->heads * d->dim), hidden, stride_of(d->inner), stride_of(2 * d->dim), stride_of(s->low_width)};
    float **parts[] = {&at->stream, &at->x, &at->qkv, &at->attended, &at->added, &at->inner, &at->turns, &at->low};
    for (int i = 0; i < 8; i++) {
        *parts[i] = base + used;
        used += s->rows * widths[i];
    }
    at->own = base + used;
    at->own_size = own_size(d, s);
    used += threads * at->own_size;
    at->rounded = base + used;
    const int64_t blocks = most_inputs(d) / INPUTS + 1;
    used += (s->rows * blocks * BYTES_OF_BLOCK / (int64_t)sizeof *base + LINES - 1) / LINES * LINES;
    at->phases = (struct phase *)(base + used);
    return used + phases_of(d) * (int64_t)(sizeof *at->phases / sizeof *base);
}

/* Sleep until `done` is no longer this number, or for no reason. */
static void sleep_while(atomic_int *done, int number)
{
#ifdef __linux__
    syscall(SYS_futex, done, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
#else
    (void)done, (void)number;
    sched_yield();
#endif
}

static void wake_all(atomic_int *done)
{
#ifdef __linux__
    syscall(SYS_futex, done, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)done;
#endif
}

static void wait_for(struct phase *phase, int64_t count)
{
    for (int spins = 0; spins < SPINS; spins++) {
        if (atomic_load_explicit(&phase->done, memory_order_acquire) >= count)
            return;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    /* Whoever does the last piece reads `sleepers` after `done` is written, and this reads them the other way round. */
    atomic_store(&phase->sleepers, 1);
    for (int done; (done = atomic_load(&phase->done)) < count;)
        sleep_while(&phase->done, done);
}

/* The next of `count` pieces of the current phase, once the last one is done. -1 if none is left: then all are done, and
the next phase begins. */
static int64_t next_piece(struct member *m, int64_t count)
{
    struct phase *phase = m->team->at.phases + m->phase;
    if (m->has_piece && atomic_fetch_add(&phase->done, 1) + 1 == count && atomic_load(&phase->sleepers))
        wake_all(&phase->done);
    const int64_t piece = atomic_fetch_add_explicit(&phase->next, 1, memory_order_relaxed);
    m->has_piece = piece < count;
    if (m->has_piece)
        return piece;
    wait_for(phase, count);
    m->phase++;
    return -1;
}

/* Number of outputs of a piece of work. Wide pieces let memory give long runs, and every thread gets one at least. The
sums of several rows stay in a core's caches in half as wide a piece. */
static int64_t columns_of(const struct team *t, int64_t outputs)
{
    int64_t columns = (outputs + t->threads - 1) / t->threads;
    while (columns > (t->s->rows > 1 ? MOST_COLUMNS / 2 : MOST_COLUMNS))
        columns = (columns + 1) / 2;
    columns = (columns + PAD - 1) / PAD * PAD;
    return columns < LEAST_COLUMNS ? LEAST_COLUMNS : columns;
}

/* Round the rows that a projection reads, if it has packed weights. */
static struct rounded rounded_for(struct member *m, const struct projection *projection, const float *x,
                                  int64_t x_stride, int64_t rows)
{
    const struct team *t = m->team;
    const int64_t blocks = projection->parts->inputs / INPUTS, wanted = 4 * t->threads;
    const int64_t some = blocks < wanted ? 1 : blocks / wanted;
    const struct rounded into = rounded_at(t->at.rounded, rows, blocks);
    const int64_t pieces = (blocks + some - 1) / some;
    if (projection->packed)
        for (int64_t piece; (piece = next_piece(m, rows * pieces)) >= 0;) {
            const int64_t row = piece / pieces, first = piece % pieces * some;
            for (int64_t block = first; block < first + some && block < blocks; block++)
                round_one(t->kernels, &into, row, block, x + row * x_stride + block * INPUTS);
        }
    return into;
}

/* out [rows, columns] = products with some outputs of a packed weight, from a multiple of TILE on, plus the bias. */
static void multiply_tiles(const struct kernels *kernels, const struct matrix *weight, int64_t first, int64_t columns,
                           const struct rounded *from, float *out, int64_t out_stride)
{
    for (int64_t column = 0; column < columns; column += TILE) {
        const int64_t left = columns - column, width = left < TILE ? left : TILE, at = first + column;
        for (int64_t row = 0; row < from->rows; row += ROWS) {
            float found[ROWS * TILE];
            const int n = multiply_with_tile(kernels, from, row, (int)weight->bits, weight->data, at / TILE, found);
            for (int one = 0; one < n; one++)
                for (int64_t i = 0; i < width; i++)
                    out[(row + one) * out_stride + column + i] =
                        found[one * TILE + i] * weight->factors[at + i] + (weight->bias ? weight->bias[at + i] : 0.0f);
        }
    }
}

/* out [rows, columns] = x times some outputs of a projection, plus the bias. */
static void multiply(const struct team *t, const struct projection *projection, int64_t first, int64_t columns,
                     const float *x, int64_t x_stride, const struct rounded *rounded, float *out, int64_t out_stride)
{
    for (const struct matrix *part = projection->parts; columns > 0; first -= part->outputs, part++) {
        if (first >= part->outputs)
            continue;
        const int64_t rest = part->outputs - first, width = rest < columns ? rest : columns;
        if (part->bits)
            multiply_tiles(t->kernels, part, first, width, rounded, out, out_stride);
        else
            t->kernels->step.multiply(part, t->d->half, first, width, x, x_stride, rounded->rows, out, out_stride);
        out += width, columns -= width, first += width;
    }
}

/* The adapters of a projection of a layer; NULL if no row of the step has one there. */
static const struct adapted *adapted_at(const struct team *t, int64_t layer, int64_t which)
{
    const struct adapted *found = t->s->adapted ? t->s->adapted + layer * PROJECTIONS + which : NULL;
    return found && found->a ? found : NULL;
}

/* Number `at` of a tensor of adapters. */
static const void *number_at(const struct team *t, const void *data, int64_t at)
{
    return (const char *)data + at * (t->d->half ? 2 : 4);
}

/* scale * A x of each row's adapter, to `low`. A row is computed by itself, so its sums do not depend on others. */
static void shrink(struct member *m, const struct adapted *own, const float *x, int64_t x_stride)
{
    const struct team *t = m->team;
    for (int64_t row; own && (row = next_piece(m, t->s->rows)) >= 0;) {
        const int64_t slot = t->s->adapter_of[row];
        for (int64_t part = 0; slot >= 0 && part < own->parts; part++) {
            const int64_t table = slot * own->table_stride + part, rank = own->rank[table];
            const void *numbers = number_at(t, own->a, slot * own->slot_stride + part * own->part_stride);
            const struct matrix a = {.data = numbers, .outputs = own->ranks, .inputs = own->inputs, .by_rows = 1};
            float *low = t->at.low + row * stride_of(t->s->low_width) + part * own->ranks;
            t->kernels->step.multiply(&a, t->d->half, 0, rank, x + row * x_stride, x_stride, 1, low, rank);
            for (int64_t i = 0; i < rank; i++)
                low[i] *= own->scale[table];
        }
    }
}

/* out [rows, columns] += B times `low` of each row's adapter, for some outputs of a projection. */
static void expand(const struct member *m, const struct adapted *own, int64_t first, int64_t columns, float *out,
                   int64_t out_stride)
{
    const struct team *t = m->team;
    float *between = m->own + t->at.own_size - MOST_COLUMNS;
    for (int64_t row = 0; own && row < t->s->rows; row++) {
        const int64_t slot = t->s->adapter_of[row];
        for (int64_t part = 0; slot >= 0 && part < own->parts; part++) {
            const int64_t rank = own->rank[slot * own->table_stride + part], begin = part ? own->ends[part - 1] : 0;
            const int64_t from = first > begin ? first : begin, end = own->ends[part];
            const int64_t to = first + columns < end ? first + columns : end;
            if (!rank || from >= to)
                continue;
            const struct matrix b = {
                .data = number_at(t, own->b, slot * own->slot_stride), .outputs = own->outputs, .inputs = rank};
            const float *low = t->at.low + row * stride_of(t->s->low_width) + part * own->ranks;
            t->kernels->step.multiply(&b, t->d->half, from, to - from, low, rank, 1, between, to - from);
            for (int64_t i = from; i < to; i++)
                out[row * out_stride + i - first] += between[i - from];
        }
    }
}

static void product(struct member *m, const struct projection *projection, const struct adapted *adapted,
                    const float *x, int64_t x_stride, float *out, int64_t out_stride)
{
    const struct team *t = m->team;
    const struct rounded rounded = rounded_for(m, projection, x, x_stride, t->s->rows);
    shrink(m, adapted, x, x_stride);
    const int64_t outputs = projection->outputs, columns = columns_of(t, outputs);
    for (int64_t piece; (piece = next_piece(m, (outputs + columns - 1) / columns)) >= 0;) {
        const int64_t first = piece * columns, rest = outputs - first, width = rest < columns ? rest : columns;
        multiply(t, projection, first, width, x, x_stride, &rounded, out + first, out_stride);
        expand(m, adapted, first, width, out + first, out_stride);
    }
}

static void gated_product(struct member *m, const struct projection *projection, const struct adapted *adapted)
{
    const struct team *t = m->team;
    const int64_t inner = t->d->inner, columns = columns_of(t, inner), count = (inner + columns - 1) / columns;
    const int64_t x_stride = stride_of(t->d->hidden), stride = stride_of(inner), rows = t->s->rows;
    const struct rounded rounded = rounded_for(m, projection, t->at.x, x_stride, rows);
    shrink(m, adapted, t->at.x, x_stride);
    for (int64_t piece; (piece = next_piece(m, count)) >= 0;) {
        const int64_t first = piece * columns, width = inner - first < columns ? inner - first : columns;
        float *gate = m->own, *up = m->own + rows * width;
        multiply(t, projection, first, width, t->at.x, x_stride, &rounded, gate, width);
        multiply(t, projection, inner + first, width, t->at.x, x_stride, &rounded, up, width);
        expand(m, adapted, first, width, gate, width);
        expand(m, adapted, inner + first, width, up, width);
        for (int64_t row = 0; row < rows; row++)
            t->kernels->step.gate(t->d->activation, gate + row * width, up + row * width, width,
                                  t->at.inner + row * stride + first);
    }
}

/* The number of the tap before a layer; -1: there is none. */
static int64_t tap_of(const struct step *s, int64_t layer)
{
    for (int64_t tap = 0; s->taps && tap < s->tap_count; tap++)
        if (s->tap_layers[tap] == layer)
            return tap;
    return -1;
}

static void copy_tap(const struct team *t, int64_t row, int64_t tap, const float *stream)
{
    const int64_t hidden = t->d->hidden, at = (row * t->s->tap_count + tap) * hidden;
    if (t->d->half)
        t->kernels->step.narrow(stream, hidden, (uint16_t *)t->s->taps + at);
    else
        memcpy((float *)t->s->taps + at, stream, (size_t)hidden * sizeof *stream);
}

/* Add what a projection gave to the stream, normed by `out_norm` if there is one, and norm the stream for the next.
The stream is copied to the tap of this number, if it is one. */
static void add_and_norm(struct member *m, bool add, const float *out_norm, const float *norm, int64_t tap)
{
    const struct team *t = m->team;
    const struct decoder *d = t->d;
    const int64_t hidden = d->hidden, stride = stride_of(hidden);
    for (int64_t row; (row = next_piece(m, t->s->rows)) >= 0;) {
        float *stream = t->at.stream + row * stride, *added = t->at.added + row * stride;
        if (add && out_norm)
            t->kernels->step.norm(added, out_norm, hidden, d->eps, added);
        for (int64_t i = 0; add && i < hidden; i++)
            stream[i] += added[i];
        if (tap >= 0)
            copy_tap(t, row, tap, stream);
        if (norm)
            t->kernels->step.norm(stream, norm, hidden, d->eps, t->at.x + row * stride);
        else
            memcpy(t->at.x + row * stride, stream, (size_t)hidden * sizeof *stream);
    }
}

static void begin(struct member *m)
{
    const struct team *t = m->team;
    const struct decoder *d = t->d;
    const int64_t half = d->dim / 2, hidden = d->hidden;
    for (int64_t row; (row = next_piece(m, t->s->rows)) >= 0;) {
        float *stream = t->at.stream + row * stride_of(hidden);
        if (d->half)
            t->kernels->step.widen((const uint16_t *)t->s->stream + row * hidden, hidden, stream);
        else
            memcpy(stream, (const float *)t->s->stream + row * hidden, (size_t)hidden * sizeof *stream);
        for (int kind = 0; kind < 2 && d->frequencies[kind]; kind++) {
            float *cosine = t->at.turns + row * stride_of(2 * d->dim) + kind * d->dim;
            for (int64_t i = 0; i < half; i++) {
                const float angle = (float)t->s->positions[row] * d->frequencies[kind][i];
                cosine[i] = cosf(angle) * d->amplitudes[kind][i];
                cosine[half + i] = sinf(angle) * d->amplitudes[kind][i];
            }
        }
    }
}

/* Norm and rotate queries and keys, and write keys and values to the cache. */
static void rotate(struct member *m, int64_t layer)
{
    const struct team *t = m->team;
    const struct decoder *d = t->d;
    const struct layer *own = d->layers + layer;
    const int64_t heads = d->heads + 2 * d->kv_heads, units = t->s->rows * heads, dim = d->dim;
    const int64_t some = units < 4 * t->threads ? 1 : units / (4 * t->threads);
    for (int64_t piece; (piece = next_piece(m, (units + some - 1) / some)) >= 0;)
        for (int64_t unit = piece * some; unit < (piece + 1) * some && unit < units; unit++) {
            const int64_t row = unit / heads, head = unit % heads, of_cache = head - d->heads;
            float *numbers = t->at.qkv + row * stride_of(widest(d)) + head * dim;
            const float *cosine = t->at.turns + row * stride_of(2 * dim) + own->rotation * dim;
            if (of_cache < d->kv_heads)
                t->kernels->step.turn(numbers, of_cache < 0 ? own->q_norm : own->k_norm, cosine, cosine + dim / 2, dim,
                                      d->eps);
            if (of_cache < 0)
                continue;
            void *cache = t->s->caches[2 * layer + (of_cache >= d->kv_heads)];
            const int64_t at = (t->s->slots[row] * d->kv_heads + of_cache % d->kv_heads) * dim;
            if (d->half)
                t->kernels->step.narrow(numbers, dim, (uint16_t *)cache + at);
            else
                memcpy((float *)cache + at, numbers, (size_t)dim * sizeof *numbers);
        }
}

static void attend(struct member *m, int64_t layer)
{
    struct team *t = m->team;
    const struct decoder *d = t->d;
    const int64_t group = d->heads / d->kv_heads, several = t->s->rows * d->kv_heads < t->threads ? 1 : group;
    const int64_t pieces = d->heads / several;
    for (int64_t piece; (piece = next_piece(m, t->s->rows * pieces)) >= 0;) {
        const int64_t row = piece / pieces, head = piece % pieces * several;
        const float *query = t->at.qkv + row * stride_of(widest(d)) + head * d->dim;
        float *out = t->at.attended + row * stride_of(d->heads * d->dim) + head * d->dim;
        if (!t->kernels->step.attend(d, t->s, layer, row, head, several, query, m->own, out))
            atomic_store(&t->failed, true);
    }
}

/* The final norm's output of the sampled rows, to `x`, and to `normed` where the step asks for it. */
static void norm_samples(struct member *m)
{
    const struct team *t = m->team;
    const struct decoder *d = t->d;
    const struct step *s = t->s;
    const int64_t stride = stride_of(d->hidden);
    for (int64_t row; (row = next_piece(m, s->samples)) >= 0;) {
        const int64_t from = s->sample_at ? s->sample_at[row] : row;
        const float *stream = t->at.stream + from * stride, *added = t->at.added + from * stride;
        const float *out_norm = d->layers[d->count - 1].mlp_out_norm;
        float *x = t->at.x + row * stride;
        if (out_norm)
            t->kernels->step.norm(added, out_norm, d->hidden, d->eps, x);
        for (int64_t i = 0; i < d->hidden; i++)
            x[i] = stream[i] + (out_norm ? x[i] : added[i]);
        t->kernels->step.norm(x, d->final_norm, d->hidden, d->eps, x);
        if (s->normed)
            memcpy(s->normed + row * d->hidden, x, (size_t)d->hidden * sizeof *x);
    }
}

/* Logits of normed rows x. */
static void head(struct member *m, const float *x, int64_t stride)
{
    const struct team *t = m->team;
    const struct decoder *d = t->d;
    const struct step *s = t->s;
    const int64_t outputs = d->head.outputs, columns = columns_of(t, outputs);
    const struct rounded rounded = rounded_for(m, &d->head, x, stride, s->samples);
    for (int64_t piece; (piece = next_piece(m, (outputs + columns - 1) / columns)) >= 0;) {
        const int64_t first = piece * columns, width = outputs - first < columns ? outputs - first : columns;
        const bool narrows = d->half && !s->wide;
        float *out = narrows ? m->own : (float *)s->logits + first;
        multiply(t, &d->head, first, width, x, stride, &rounded, out, narrows ? width : outputs);
        for (int64_t row = 0; narrows && row < s->samples; row++)
            t->kernels->step.narrow(out + row * width, width, (uint16_t *)s->logits + row * outputs + first);
    }
}

static void work(void *data)
{
    struct team *t = data;
    const struct decoder *d = t->d;
    struct member m = {.team = t, .own = t->at.own + atomic_fetch_add(&t->members, 1) * t->at.own_size};
    const int64_t hidden = stride_of(d->hidden);
    begin(&m);
    for (int64_t i = 0; i < d->count; i++) {
        const struct layer *layer = d->layers + i;
        add_and_norm(&m, i > 0, i ? layer[-1].mlp_out_norm : NULL, layer->input_norm,
                     tap_of(t->s, i));
        product(&m, &layer->qkv, adapted_at(t, i, QKV), t->at.x, hidden, t->at.qkv, stride_of(widest(d)));
        rotate(&m, i);
        attend(&m, i);
        product(&m, &layer->o, adapted_at(t, i, O), t->at.attended, stride_of(d->heads * d->dim), t->at.added, hidden);
        add_and_norm(&m, true, layer->attention_out_norm, layer->post_norm, -1);
        gated_product(&m, &layer->gate_up, adapted_at(t, i, GATE_UP));
        product(&m, &layer->down, adapted_at(t, i, DOWN), t->at.inner, stride_of(d->inner), t->at.added, hidden);
    }
    if (t->s->samples)
        norm_samples(&m);
    if (t->s->samples && t->s->logits)
        head(&m, t->at.x, hidden);
}

static void only_head(void *data)
{
    struct team *t = data;
    struct member m = {.team = t, .own = t->at.own + atomic_fetch_add(&t->members, 1) * t->at.own_size};
    head(&m, t->s->normed, t->d->hidden);
}

static void divide_and_run(void (*task)(void *), struct team *team, run_parallel *parallel)
{
    divide(team->d, team->s, team->threads, &team->at);
    for (int64_t phase = 0; phase < phases_of(team->d); phase++)
        memset(team->at.phases + phase, 0, sizeof *team->at.phases);
    if (team->threads > 1)
        parallel(task, team, (unsigned)team->threads, 0);
    else
        task(team);
}

/* Bytes of struct step, by which a caller knows a library of other sources. */
int64_t holdfast_step_size(void) { return sizeof(struct step); }

/* Bytes of scratch memory that a step needs with so many threads. */
int64_t holdfast_step_bytes(const struct decoder *decoder, const struct step *step, int threads)
{
    struct step empty = *step;
    struct place at;
    empty.scratch = NULL;
    return divide(decoder, &empty, threads, &at) * (int64_t)sizeof(float);
}

/* Compute a step. Returns 0; 1 for sizes that it does not take, 2 for a slot, a block, a position or a row of the tables
that does not exist. Nothing is written then, except where a block is missing: keys and values of the step may be. */
int holdfast_step(const struct decoder *decoder, const struct step *step, run_parallel *parallel, int threads, int level)
{
    const struct kernels *kernels = holdfast_kernels(level);
    const struct decoder *d = decoder;
    if (!kernels || threads < 1 || d->count < 1 || step->rows < 1 || d->kv_heads < 1 || d->heads % d->kv_heads ||
        d->dim % PAD || step->samples < 0 || step->samples > step->rows)
        return 1;
    for (int64_t row = 0; row < step->rows; row++)
        if (step->slots[row] < 0 || step->slots[row] >= step->blocks * step->block_size || step->positions[row] < 0 ||
            step->positions[row] >= step->longest || step->positions[row] / step->block_size >= step->table_width ||
            step->table_rows[row] < 0 || step->table_rows[row] >= step->table_count)
            return 2;
    for (int64_t row = 0; step->adapted && row < step->rows; row++)
        if (step->adapter_of[row] < -1 || step->adapter_of[row] >= step->adapter_slots)
            return 2;
    for (int64_t row = 0; step->sample_at && row < step->samples; row++)
        if (step->sample_at[row] < 0 || step->sample_at[row] >= step->rows)
            return 2;
    struct team team = {.kernels = kernels, .d = d, .s = step, .threads = parallel ? threads : 1};
    divide_and_run(work, &team, parallel);
    return atomic_load(&team.failed) ? 2 : 0;
}

/* The logits of rows whose `normed` a step has given, with the bits that a step gives them. Of the step, only rows,
samples, which are as many, `normed`, `logits` and `scratch` are read. Returns 0; 1 for sizes that it does not take. */
int holdfast_head(const struct decoder *decoder, const struct step *step, run_parallel *parallel, int threads, int level)
{
    const struct kernels *kernels = holdfast_kernels(level);
    if (!kernels || threads < 1 || step->rows < 1 || step->samples != step->rows || !step->normed || !step->logits)
        return 1;
    struct team team = {.kernels = kernels, .d = decoder, .s = step, .threads = parallel ? threads : 1};
    divide_and_run(only_head, &team, parallel);
    return 0;
}
