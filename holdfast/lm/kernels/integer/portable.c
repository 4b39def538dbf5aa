/* Products in plain C, for processors that the other files have no instructions for. */

#include "plain.h"

enum { FLOATS = 4, COLUMNS = 1, STREAMS = 4, WEIGHT_ROWS = 4, DOT_ROWS = 2 };

#include "step.h"

static float half(const uint8_t *from)
{
    uint16_t bits;
    memcpy(&bits, from, 2);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent ? ldexpf((float)(fraction | 1024), exponent - 25) : ldexpf((float)fraction, -24);
    return bits >> 15 ? -size : size;
}

/* The number of an input and a row in a block whose numbers begin at `from`. */
static int number(int bits, const uint8_t *from, int input, int row)
{
    const int vector = input / 4, byte = 4 * row + input % 4;
    if (bits == 8)
        return from[64 * vector + byte];
    const int low = from[64 * (vector / 2) + byte] >> 4 * (vector % 2) & 15;
    if (bits == 4)
        return low;
    return low | (from[256 + 64 * (vector / 4) + byte] >> 2 * (vector % 4) & 3) << 4;
}

static void multiply(int bits, int n, const uint8_t *tile, int64_t blocks, struct batch a, float *out)
{
    const int size = bits == 4 ? 320 : bits == 6 ? 448 : 544, header = bits == 8 ? 32 : 64;
    memset(out, 0, sizeof(float) * TILE * n);
    for (int64_t block = 0; block < blocks; block++) {
        for (int of_tile = 0; of_tile < TILE; of_tile++) {
            int8_t numbers[INPUTS];
            uint8_t weights[INPUTS];
            for (int input = 0; input < INPUTS; input++)
                weights[input] = (uint8_t)number(bits, tile + header, input, of_tile);
            const float scale = half(tile + 2 * of_tile), other = bits == 8 ? scale : half(tile + 32 + 2 * of_tile);
            for (int row = 0; row < n; row++) {
                memcpy(numbers, a.numbers + INPUTS * row, INPUTS);
                int32_t sums[2] = {0, 0};
                for (int input = 0; input < INPUTS; input++)
                    sums[input / 16] += weights[input] * numbers[input];
                float found;
                if (bits == 4)
                    found = (float)(sums[0] + sums[1]) * scale + other * a.totals[row];
                else
                    found = (float)(sums[0] + a.starts[row]) * scale + (float)(sums[1] + a.starts[n + row]) * other;
                out[TILE * row + of_tile] += found * a.scales[row];
            }
        }
        tile += size, a.numbers += INPUTS * n, a.scales += n, a.starts += 2 * n, a.totals += n;
    }
}

#define KERNEL(bits)                                                                                         \
    static void tile_##bits(const uint8_t *tile, int64_t blocks, int n, struct batch batch, float *out)      \
    {                                                                                                        \
        multiply(bits, n, tile, blocks, batch, out);                                                         \
    }

KERNEL(4)
KERNEL(6)
KERNEL(8)

INLINED float total(vec numbers) { return numbers[0] + numbers[1] + (numbers[2] + numbers[3]); }

const struct kernels holdfast_portable = KERNELS;
