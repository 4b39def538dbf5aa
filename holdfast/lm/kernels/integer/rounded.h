/* Activations rounded to 8 bits, and their products with tiles. Threads share the work in products.c and in step.c. */

#ifndef HOLDFAST_ROUNDED_H
#define HOLDFAST_ROUNDED_H

#include "integer.h"

enum { BYTES_OF_BLOCK = INPUTS + 2 * sizeof(float) + 4 * sizeof(int32_t) };

/* Rows of blocks in the order of struct batch. */
struct rounded {
    int8_t *numbers;
    float *scales, *totals;
    int32_t *starts[2];  /* for weights of 6 and of 8 bits */
    int64_t rows, blocks;
};

static inline int64_t bytes_of_tile(int bits, int64_t blocks)
{
    return blocks * (bits == 4 ? 320 : bits == 6 ? 448 : 544);
}

/* Room for rows in memory of rows * blocks * BYTES_OF_BLOCK bytes. */
static inline struct rounded rounded_at(void *place, int64_t rows, int64_t blocks)
{
    const int64_t groups = rows * blocks;
    struct rounded into = {.numbers = place, .rows = rows, .blocks = blocks};
    into.scales = (float *)(into.numbers + groups * INPUTS);
    into.totals = into.scales + groups;
    into.starts[0] = (int32_t *)(into.totals + groups);
    into.starts[1] = into.starts[0] + 2 * groups;
    return into;
}

/* Round the numbers of a block of a row. */
static inline void round_one(const struct kernels *kernels, const struct rounded *into, int64_t row, int64_t block,
                             const float *from)
{
    const int64_t batch = row / ROWS, place = row % ROWS, left = into->rows - batch * ROWS, n = left < ROWS ? left : ROWS;
    const int64_t first = batch * ROWS * into->blocks + block * n, at = first + place;
    int8_t *numbers = into->numbers + at * INPUTS;
    into->scales[at] = kernels->round(from, numbers);
    int32_t sums[2] = {0, 0};
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < INPUTS / 2; i++)
            sums[half] += numbers[INPUTS / 2 * half + i];
    into->totals[at] = (float)(sums[0] + sums[1]);
    for (int which = 0; which < 2; which++) {
        int32_t *starts = into->starts[which] + 2 * first + place;
        const int offset = which ? 128 : 32;
        starts[0] = -offset * sums[0];
        starts[n] = -offset * sums[1];
    }
}

/* Products of up to ROWS rows, from row `row` on, a multiple of ROWS, with tile `tile` of a weight: found [rows][16]. */
static inline int multiply_with_tile(const struct kernels *kernels, const struct rounded *from, int64_t row, int bits,
                                     const void *data, int64_t tile, float *found)
{
    const int64_t left = from->rows - row, at = row * from->blocks;
    const int n = left < ROWS ? (int)left : ROWS;
    const int32_t *starts = from->starts[bits == 8] + 2 * at;
    const struct batch batch = {from->numbers + at * INPUTS, from->scales + at, starts, from->totals + at};
    const uint8_t *of_tile = (const uint8_t *)data + tile * bytes_of_tile(bits, from->blocks);
    kernels->tiles[bits / 2 - 2](of_tile, from->blocks, n, batch, found);
    return n;
}

#endif
