/* A whole step of a decoder on few tokens: all layers, in one team of threads.

A step of one token reads every weight once, which takes most of its time. Calls of one operation each would wait for
memory again and again, because the weights have just replaced code and data in the caches. Activations and sums are in
float32. Each number is computed by one thread in a fixed order, so results do not depend on the number of threads.

Each file of instructions includes this one. It defines FLOATS, the numbers of a vector; COLUMNS, the vectors of outputs
that are computed together; STREAMS, the rows of a weight that are read together for one token; WEIGHT_ROWS and DOT_ROWS,
the rows of a weight and the tokens that are multiplied together; and `total`, the sum of a vector. */

#define INLINED static inline __attribute__((always_inline))
/* Numbers of a small array stay in registers only if every loop over it is unrolled. */
#define UNROLLED _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * FLOATS)));
typedef uint32_t words __attribute__((vector_size(4 * FLOATS)));
typedef uint16_t shorts __attribute__((vector_size(2 * FLOATS)));

/* BLOCKS_AHEAD: how many times INPUTS_AT_A_TIME rows before their use numbers of a weight are asked for. */
enum { INPUTS_AT_A_TIME = 8, BLOCKS_AHEAD = 2, LINE = 64 };

INLINED float total(vec numbers);

INLINED vec floats(const float *from)
{
    vec numbers;
    memcpy(&numbers, from, sizeof numbers);
    return numbers;
}

INLINED void put(float *into, vec numbers) { memcpy(into, &numbers, sizeof numbers); }

/* Numbers of a weight or a cache from index `at` on, in float32 or bfloat16. */
INLINED vec read_vector(const void *data, int64_t at, bool half)
{
    if (!half)
        return floats((const float *)data + at);
    shorts halves;
    memcpy(&halves, (const uint16_t *)data + at, sizeof halves);
    const words wide = __builtin_convertvector(halves, words) << 16;
    vec numbers;
    memcpy(&numbers, &wide, sizeof numbers);
    return numbers;
}

INLINED float read_one(const void *data, int64_t at, bool half)
{
    return half ? widened(((const uint16_t *)data)[at]) : ((const float *)data)[at];
}

/* Ask for the line of a weight that has this number. It comes into the second cache: the first has no room to spare.
Processors guess what is read next within a page only, and a row of a piece of work is shorter. An address beyond the
weight does no harm. */
INLINED void ask_for(const void *data, int64_t at, bool half)
{
    __builtin_prefetch((const char *)data + at * (half ? 2 : 4), 0, 2);
}

/* Add `count` inputs' part of products to `vectors` vectors of outputs. Rows of the weight are read side by side, so
that memory gives several streams at once. With `ahead`, ask for the same outputs of later rows. */
INLINED void add_inputs(const void *data, int64_t at, int64_t outputs, bool half, bool ahead, int count, int vectors,
                        const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride)
{
    vec weights[INPUTS_AT_A_TIME][COLUMNS];
    UNROLLED for (int i = 0; i < count; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            weights[i][v] = read_vector(data, at + i * outputs + v * FLOATS, half);
    UNROLLED for (int i = 0; ahead && i < count; i++)
        UNROLLED for (int v = 0; v < vectors; v++)
            if (v * FLOATS * (half ? 2 : 4) % LINE == 0)
                ask_for(data, at + (BLOCKS_AHEAD * count + i) * outputs + v * FLOATS, half);
    for (int64_t row = 0; row < rows; row++, x += x_stride, out += out_stride) {
        vec sums[COLUMNS];
        UNROLLED for (int v = 0; v < vectors; v++)
            sums[v] = floats(out + v * FLOATS);
        UNROLLED for (int i = 0; i < count; i++)
            UNROLLED for (int v = 0; v < vectors; v++)
                sums[v] += weights[i][v] * x[i];
        UNROLLED for (int v = 0; v < vectors; v++)
            put(out + v * FLOATS, sums[v]);
    }
}

INLINED void add_block(const void *data, int64_t at, int64_t outputs, bool half, int count, int64_t columns,
                       const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride)
{
    const int size = half ? 2 : 4, wide = COLUMNS * FLOATS * size;
    int64_t column = 0;
    for (; column + COLUMNS * FLOATS <= columns; column += COLUMNS * FLOATS)
        add_inputs(data, at + column, outputs, half, wide % LINE == 0 || column * size % LINE == 0, count, COLUMNS, x,
                   x_stride, rows, out + column, out_stride);
    for (; column + FLOATS <= columns; column += FLOATS)
        add_inputs(data, at + column, outputs, half, true, count, 1, x, x_stride, rows, out + column, out_stride);
    for (; column < columns; column++)
        for (int64_t row = 0; row < rows; row++)
            for (int i = 0; i < count; i++)
                out[row * out_stride + column] +=
                    x[row * x_stride + i] * read_one(data, at + i * outputs + column, half);
}

/* out [rows, columns] += x times a weight [inputs, outputs], of which `data` is the first column. */
INLINED void add_by_inputs(const struct matrix *weight, int64_t first, int64_t columns, bool half, const float *x,
                           int64_t x_stride, int64_t rows, float *out, int64_t out_stride)
{
    const int64_t outputs = weight->outputs, whole = weight->inputs / INPUTS_AT_A_TIME * INPUTS_AT_A_TIME;
    for (int64_t input = 0; input < whole; input += INPUTS_AT_A_TIME)
        add_block(weight->data, input * outputs + first, outputs, half, INPUTS_AT_A_TIME, columns, x + input, x_stride,
                  rows, out, out_stride);
    for (int64_t input = whole; input < weight->inputs; input++)
        add_block(weight->data, input * outputs + first, outputs, half, 1, columns, x + input, x_stride, rows, out,
                  out_stride);
}

/* Inner products of `count` rows of a weight with `tokens` rows of x, added to out. With `ahead`, ask for the next rows. */
INLINED void add_dots(const struct matrix *weight, int64_t first, bool half, bool ahead, int count, int tokens,
                      const float *x, int64_t x_stride, float *out, int64_t out_stride)
{
    const int64_t inputs = weight->inputs, whole = inputs / FLOATS * FLOATS;
    const int size = half ? 2 : 4;
    vec sums[DOT_ROWS][STREAMS];
    UNROLLED for (int token = 0; token < tokens; token++)
        UNROLLED for (int i = 0; i < count; i++)
            sums[token][i] = (vec){0.0f};
    for (int64_t input = 0; input < whole; input += FLOATS) {
        vec own[DOT_ROWS];
        UNROLLED for (int token = 0; token < tokens; token++)
            own[token] = floats(x + token * x_stride + input);
        UNROLLED for (int i = 0; i < count; i++) {
            const vec numbers = read_vector(weight->data, (first + i) * inputs + input, half);
            if (ahead && (FLOATS * size % LINE == 0 || input * size % LINE == 0))
                ask_for(weight->data, (first + count + i) * inputs + input, half);
            UNROLLED for (int token = 0; token < tokens; token++)
                sums[token][i] += own[token] * numbers;
        }
    }
    UNROLLED for (int token = 0; token < tokens; token++)
        UNROLLED for (int i = 0; i < count; i++) {
            float sum = total(sums[token][i]);
            for (int64_t input = whole; input < inputs; input++)
                sum += x[token * x_stride + input] * read_one(weight->data, (first + i) * inputs + input, half);
            out[token * out_stride + i] += sum;
        }
}

#define OF_TOKENS(n)                                                                                       \
    case n:                                                                                                \
        add_dots(weight, first + column, half, row == 0, WEIGHT_ROWS, n < DOT_ROWS ? n : DOT_ROWS,         \
                 x + row * x_stride, x_stride, out + row * out_stride + column, out_stride);               \
        break;

/* out [rows, columns] += x times a weight [outputs, inputs], from its row `first` on. */
INLINED void add_by_rows(const struct matrix *weight, int64_t first, int64_t columns, bool half, const float *x,
                         int64_t x_stride, int64_t rows, float *out, int64_t out_stride)
{
    int64_t column = 0;
    if (rows == 1)
        for (; column + STREAMS <= columns; column += STREAMS)
            add_dots(weight, first + column, half, true, STREAMS, 1, x, x_stride, out + column, out_stride);
    const int64_t parts = (rows + DOT_ROWS - 1) / DOT_ROWS, tokens = (rows + parts - 1) / parts;
    for (; column + WEIGHT_ROWS <= columns; column += WEIGHT_ROWS)
        for (int64_t row = 0; row < rows; row += tokens)
            switch (rows - row < tokens ? rows - row : tokens) {
                OF_TOKENS(1) OF_TOKENS(2) OF_TOKENS(3)
            }
    for (; column < columns; column++)
        for (int64_t row = 0; row < rows; row++)
            add_dots(weight, first + column, half, false, 1, 1, x + row * x_stride, x_stride,
                     out + row * out_stride + column, out_stride);
}

/* out [rows, columns] = x times some outputs of a weight, plus the bias. */
static void multiply_some_outputs(const struct matrix *weight, bool half, int64_t first, int64_t columns, const float *x,
                                  int64_t x_stride, int64_t rows, float *out, int64_t out_stride)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < columns; column++)
            out[row * out_stride + column] = weight->bias ? weight->bias[first + column] : 0.0f;
    if (weight->by_rows && half)
        add_by_rows(weight, first, columns, true, x, x_stride, rows, out, out_stride);
    else if (weight->by_rows)
        add_by_rows(weight, first, columns, false, x, x_stride, rows, out, out_stride);
    else if (half)
        add_by_inputs(weight, first, columns, true, x, x_stride, rows, out, out_stride);
    else
        add_by_inputs(weight, first, columns, false, x, x_stride, rows, out, out_stride);
}

/* out = the RMS norm of numbers times weight. The two may be the same. */
static void norm_floats(const float *from, const float *weight, int64_t width, float eps, float *out)
{
    float sums[LANES] = {0.0f}, sum = 0.0f;
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES)
        for (int i = 0; i < LANES; i++)
            sums[i] += from[at + i] * from[at + i];
    for (int i = 0; at < width; at++, i++)
        sums[i] += from[at] * from[at];
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    const float inverse = 1.0f / sqrtf(sum / (float)width + eps);
    for (int64_t i = 0; i < width; i++)
        out[i] = from[i] * inverse * weight[i];
}

/* e**x for x of 0 and below. */
static inline float decayed(float x) { return exponential(x < -87.0f ? -87.0f : x); }

static inline float tangent(float x)
{
    const float size = fabsf(x), small = decayed(-2.0f * size), found = (1.0f - small) / (1.0f + small);
    return x < 0.0f ? -found : found;
}

/* out = activation(gate) * up. */
static void gate_floats(int64_t activation, const float *gate, const float *up, int64_t width, float *restrict out)
{
    if (activation == SILU)
        for (int64_t i = 0; i < width; i++) {
            const float small = decayed(-fabsf(gate[i]));
            out[i] = gate[i] * ((gate[i] < 0.0f ? small : 1.0f) / (1.0f + small)) * up[i];
        }
    else
        for (int64_t i = 0; i < width; i++) {
            const float x = gate[i], inner = 0.79788456f * (x + 0.044715f * x * x * x);
            out[i] = 0.5f * x * (1.0f + tangent(inner)) * up[i];
        }
}

/* Norm and rotate a head of queries or keys in place. */
static void turn_floats(float *head, const float *weight, const float *cosine, const float *sine, int64_t dim, float eps)
{
    if (weight)
        norm_floats(head, weight, dim, eps, head);
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cosine[i] - second * sine[i];
        head[i + half] = second * cosine[i] + first * sine[i];
    }
}

static float sum_of(const float *numbers, int64_t count)
{
    float sums[LANES] = {0.0f}, sum = 0.0f;
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        for (int i = 0; i < LANES; i++)
            sums[i] += numbers[at + i];
    for (; at < count; at++)
        sum += numbers[at];
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    return sum;
}

static float largest_of(const float *numbers, int64_t count, float most)
{
    float lanes[LANES];
    int64_t at = 0;
    for (int i = 0; i < LANES; i++)
        lanes[i] = most;
    for (; at + LANES <= count; at += LANES)
        for (int i = 0; i < LANES; i++)
            lanes[i] = numbers[at + i] > lanes[i] ? numbers[at + i] : lanes[i];
    for (; at < count; at++)
        most = numbers[at] > most ? numbers[at] : most;
    for (int i = 0; i < LANES; i++)
        most = lanes[i] > most ? lanes[i] : most;
    return most;
}

/* Turn scores into weights that add up to 1, less the sink's. */
static void weigh(float *scores, int64_t length, float softcap, const float *sink)
{
    if (softcap > 0.0f)
        for (int64_t i = 0; i < length; i++)
            scores[i] = softcap * tangent(scores[i] / softcap);
    const float most = largest_of(scores, length, sink ? *sink : scores[0]);
    for (int64_t i = 0; i < length; i++)
        scores[i] = decayed(scores[i] - most);
    const float sum = sum_of(scores, length) + (sink ? decayed(*sink - most) : 0.0f);
    for (int64_t i = 0; i < length; i++)
        scores[i] /= sum;
}

/* The first position that the token of a row sees. */
static inline int64_t first_seen(const struct layer *layer, int64_t position)
{
    if (!layer->window)
        return 0;
    const int64_t first = layer->chunked ? position / layer->window * layer->window : position - layer->window + 1;
    return first < 0 ? 0 : first;
}

/* Ask for a KV head of the positions from `at` to the end of its block. Processors do not guess where a block is. */
INLINED void ask_for_block(const void *cache, const struct step *s, const int32_t *table, int64_t at, int64_t position,
                           int64_t token, int64_t offset, int64_t dim, bool half)
{
    if (at > position || table[at / s->block_size] < 0)
        return;
    const int64_t size = s->block_size, end = (at / size + 1) * size, stop = end <= position ? end : position + 1;
    for (int64_t place = (table[at / size] * size + at % size) * token + offset; at < stop; at++, place += token)
        for (int64_t i = 0; i < dim; i += LINE / (half ? 2 : 4))
            ask_for(cache, place + i, half);
}

/* Attention of `count` query heads of one token, from head `head` on, which share a KV head. `scores` has room for count
times all positions. Returns false for a block that the cache lacks. */
INLINED bool attend_some(const struct decoder *d, const struct step *s, int64_t layer, int64_t row, int64_t head,
                         int64_t count, bool half, const float *query, float *scores, float *out)
{
    const struct layer *own = d->layers + layer;
    const void *keys = s->caches[2 * layer], *values = s->caches[2 * layer + 1];
    const int64_t dim = d->dim, size = s->block_size, token = d->kv_heads * dim, position = s->positions[row];
    const int64_t offset = head / (d->heads / d->kv_heads) * dim, first = first_seen(own, position);
    const int64_t length = position + 1 - first;
    const int32_t *table = s->tables + s->table_rows[row] * s->table_width;
    for (int64_t at = first; at <= position;) {
        const int64_t block = table[at / size], end = (at / size + 1) * size, stop = end <= position ? end : position + 1;
        if (block < 0 || block >= s->blocks)
            return false;
        ask_for_block(keys, s, table, stop, position, token, offset, dim, half);
        int64_t place = (block * size + at % size) * token + offset;
        for (; at < stop; at++, place += token)
            for (int64_t one = 0; one < count; one++) {
                vec sum = floats(query + one * dim) * read_vector(keys, place, half);
                for (int64_t i = FLOATS; i < dim; i += FLOATS)
                    sum += floats(query + one * dim + i) * read_vector(keys, place + i, half);
                scores[one * length + at - first] = total(sum) * d->scale;
            }
    }
    ask_for_block(values, s, table, first, position, token, offset, dim, half);
    for (int64_t one = 0; one < count; one++) {
        weigh(scores + one * length, length, d->softcap, own->sinks ? own->sinks + head + one : NULL);
        memset(out + one * dim, 0, (size_t)dim * sizeof *out);
    }
    for (int64_t at = first; at <= position;) {
        const int64_t end = (at / size + 1) * size, stop = end <= position ? end : position + 1;
        const int64_t place = (table[at / size] * size + at % size) * token + offset;
        ask_for_block(values, s, table, stop, position, token, offset, dim, half);
        for (int64_t i = 0; i < dim; i += FLOATS)
            for (int64_t one = 0; one < count; one++) {
                const float *weights = scores + one * length + at - first;
                vec sum = floats(out + one * dim + i);
                for (int64_t j = 0; j < stop - at; j++)
                    sum += read_vector(values, place + j * token + i, half) * weights[j];
                put(out + one * dim + i, sum);
            }
        at = stop;
    }
    return true;
}

static bool attend_heads(const struct decoder *d, const struct step *s, int64_t layer, int64_t row, int64_t head,
                         int64_t count, const float *query, float *scores, float *out)
{
    if (d->half)
        return attend_some(d, s, layer, row, head, count, true, query, scores, out);
    return attend_some(d, s, layer, row, head, count, false, query, scores, out);
}

static void widen_floats(const uint16_t *from, int64_t count, float *restrict into)
{
    for (int64_t i = 0; i < count; i++)
        into[i] = widened(from[i]);
}

static void narrow_floats(const float *from, int64_t count, uint16_t *restrict into)
{
    for (int64_t i = 0; i < count; i++)
        into[i] = narrowed(from[i]);
}

#define STEP_KERNELS \
    {multiply_some_outputs, norm_floats, gate_floats, turn_floats, attend_heads, widen_floats, narrow_floats}
