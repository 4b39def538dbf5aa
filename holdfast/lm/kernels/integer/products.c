/* Products of activations with packed weights on a CPU: rounding, threads, and the choice of instructions.

Activations are rounded to 8 bits with a scale for each 32 inputs, and multiplied as integers. Work is divided among the
threads of the OpenMP library that PyTorch has loaded, whose GOMP_parallel the caller gives: a second team of threads
would wait on the first one's cores. */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "rounded.h"
#include "threads.h"

enum { MOST_ROWS = 64, ALIGNMENT = 64, FEW = 1 << 15 };

struct job {
    const struct kernels *kernels;
    int bits;
    const uint8_t *data;
    const float *factors;
    int64_t outputs, tiles, blocks, rows, inputs;
    const void *x;
    void *out;
    bool half;  /* x and out are bfloat16, else float32 */
    struct rounded rounded;
    int64_t chunk;
    atomic_int_fast64_t next;
};

static float widened(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static uint16_t narrowed(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Round block `block` of row `row`. */
static void round_at(struct job *job, int64_t row, int64_t block)
{
    const int64_t from = row * job->inputs + block * INPUTS;
    float own[INPUTS];
    if (job->half)
        for (int i = 0; i < INPUTS; i++)
            own[i] = widened(((const uint16_t *)job->x)[from + i]);
    else
        memcpy(own, (const float *)job->x + from, sizeof own);
    round_one(job->kernels, &job->rounded, row, block, own);
}

static void round_some(void *data)
{
    struct job *job = data;
    const int64_t all = job->rows * job->blocks;
    for (;;) {
        const int64_t first = atomic_fetch_add(&job->next, job->chunk), stop = first + job->chunk;
        if (first >= all)
            return;
        for (int64_t at = first; at < (stop < all ? stop : all); at++)
            round_at(job, at / job->blocks, at % job->blocks);
    }
}

/* Write the products of n rows from `row` on with tile `tile`. */
static void write_out(const struct job *job, int64_t tile, int64_t row, int n, const float *found)
{
    const int64_t left = job->outputs - tile * TILE, width = left < TILE ? left : TILE;
    const float *factors = job->factors + tile * TILE;
    for (int of_batch = 0; of_batch < n; of_batch++, found += TILE) {
        const int64_t at = (row + of_batch) * job->outputs + tile * TILE;
        for (int64_t i = 0; i < width; i++)
            if (job->half)
                ((uint16_t *)job->out)[at + i] = narrowed(found[i] * factors[i]);
            else
                ((float *)job->out)[at + i] = found[i] * factors[i];
    }
}

/* Multiply a tile with rows from `first` to `stop`. */
static void multiply_rows(const struct job *job, int64_t tile, int64_t first, int64_t stop)
{
    for (int64_t row = first; row < stop; row += ROWS) {
        float found[ROWS * TILE];
        const int n = multiply_with_tile(job->kernels, &job->rounded, row, job->bits, job->data, tile, found);
        write_out(job, tile, row, n, found);
    }
}

/* Each piece of work is some tiles with up to MOST_ROWS rows, so that these stay in a core's cache. */
static void multiply_some(void *data)
{
    struct job *job = data;
    const int64_t pieces = (job->tiles + job->chunk - 1) / job->chunk, parts = (job->rows + MOST_ROWS - 1) / MOST_ROWS;
    for (;;) {
        const int64_t piece = atomic_fetch_add(&job->next, 1);
        if (piece >= pieces * parts)
            return;
        const int64_t row = piece / pieces * MOST_ROWS, tile = piece % pieces * job->chunk;
        const int64_t stop = row + MOST_ROWS < job->rows ? row + MOST_ROWS : job->rows;
        for (int64_t at = tile; at < tile + job->chunk && at < job->tiles; at++)
            multiply_rows(job, at, row, stop);
    }
}

static void run(struct job *job, void (*work)(void *), run_parallel *parallel, int threads, int64_t chunk)
{
    job->chunk = chunk < 1 ? 1 : chunk;
    atomic_store(&job->next, 0);
    if (threads > 1)
        parallel(work, job, (unsigned)threads, 0);
    else
        work(job);
}

const struct kernels *holdfast_kernels(int level)
{
#ifdef __x86_64__
    if (level == 2)
        return &holdfast_avx512;
    if (level == 1)
        return &holdfast_avx2;
#endif
    return level ? NULL : &holdfast_portable;
}

/* The best instructions that this processor has: 2 for AVX-512 with VNNI, 1 for AVX2, 0 for plain C. */
int holdfast_level(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1;  /* every processor with AVX2 converts float16, too */
#endif
    return 0;
}

/* out [rows, outputs] = x [rows, inputs] times the weight transposed. Returns 0; 1 for sizes that it does not take, 2
without memory. `data` has whole tiles, and `factors` a number for each of their rows. */
int holdfast_multiply(const void *data, const float *factors, int64_t outputs, int64_t inputs, int bits, const void *x,
                      int64_t rows, int half, void *out, run_parallel *parallel, int threads, int level)
{
    const struct kernels *kernels = holdfast_kernels(level);
    if (!kernels || outputs < 1 || rows < 1 || inputs < INPUTS || inputs % INPUTS || threads < 1 || (bits != 4 && bits != 6 && bits != 8))
        return 1;
    struct job job = {.kernels = kernels, .bits = bits};
    job.data = data, job.factors = factors, job.outputs = outputs, job.inputs = inputs, job.x = x, job.rows = rows;
    job.out = out, job.half = half, job.blocks = inputs / INPUTS, job.tiles = (outputs + TILE - 1) / TILE;
    const int64_t groups = rows * job.blocks, size = groups * BYTES_OF_BLOCK + ALIGNMENT;
    uint8_t *place = aligned_alloc(ALIGNMENT, (size_t)((size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT));
    if (!place)
        return 2;
    job.rounded = rounded_at(place, rows, job.blocks);
    const bool alone = parallel == NULL || threads < 2;
    run(&job, round_some, parallel, alone || rows * inputs < FEW ? 1 : threads, groups / threads / 4);
    run(&job, multiply_some, parallel, alone || outputs * inputs < FEW ? 1 : threads, job.tiles / threads / 8);
    free(place);
    return 0;
}
