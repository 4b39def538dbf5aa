/* Rounding and the operations of a layer, in plain C that compilers turn into each file's vectors. */

#include <math.h>
#include <string.h>
#include "integer.h"

enum { LANES = 16 };

/* Adding it rounds a number below 2**22 to an integer, which then stands in the low bits. */
static const float MAGIC = 12582912.0f;

static inline uint32_t bits_of(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

static inline float number_of(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static inline float widened(uint16_t half) { return number_of((uint32_t)half << 16); }

static inline uint16_t narrowed(float number)
{
    const uint32_t bits = bits_of(number), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

static float round_plain(const float *from, int8_t *numbers)
{
    uint32_t largest = 0;
    for (int i = 0; i < INPUTS; i++) {
        uint32_t size = bits_of(from[i]) & 0x7fffffff;  /* sizes order as their bits do; infinity and NaN come last */
        largest = size > largest ? size : largest;
    }
    const float most = number_of(largest);
    const float inverse = most < 1e-30f || largest >= 0x7f800000 ? 0.0f : 127.0f / most;
    for (int i = 0; i < INPUTS; i++) {
        float shifted = (inverse == 0.0f ? 0.0f : from[i] * inverse) + MAGIC;
        numbers[i] = (int8_t)bits_of(shifted);
    }
    return largest >= 0x7f800000 ? NAN : inverse == 0.0f ? 0.0f : most / 127.0f;
}

static void norm_plain(const void *operation, int64_t row)
{
    const struct norm *o = operation;
    const int64_t width = o->width;
    uint16_t *restrict stream = o->stream + row * width, *restrict out = o->out + row * width;
    if (o->added) {
        const uint16_t *restrict added = o->added + row * width;
        for (int64_t i = 0; i < width; i++)
            stream[i] = narrowed(widened(stream[i]) + widened(added[i]));
    }
    float sums[LANES] = {0.0f}, sum = 0.0f;  /* sums of their own need no order of additions */
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES)
        for (int i = 0; i < LANES; i++)
            sums[i] += widened(stream[at + i]) * widened(stream[at + i]);
    for (int i = 0; at < width; at++, i++)
        sums[i] += widened(stream[at]) * widened(stream[at]);
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    const float inverse = 1.0f / sqrtf(sum / (float)width + o->eps);
    for (int64_t i = 0; i < width; i++)
        out[i] = narrowed(widened(stream[i]) * inverse * widened(o->weight[i]));
}

/* e**x for x from -87 to 0, within 2 units in the last place (Cephes' polynomial). */
static inline float exponential(float x)
{
    const float shifted = x * 1.44269504f + MAGIC, whole = shifted - MAGIC;
    const float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * number_of((bits_of(shifted) + 127) << 23);
}

static void gate_plain(const void *operation, int64_t row)
{
    const struct gate *o = operation;
    const uint16_t *restrict gate = o->both + row * 2 * o->width, *restrict up = gate + o->width;
    uint16_t *restrict out = o->out + row * o->width;
    for (int64_t i = 0; i < o->width; i++) {
        /* The exponential of minus the size cannot overflow, and gives the sigmoid of either sign. */
        const float x = widened(gate[i]), size = fabsf(x), small = exponential(-(size > 87.0f ? 87.0f : size));
        const float sigmoid = (x < 0.0f ? small : 1.0f) / (1.0f + small);
        out[i] = narrowed(x * sigmoid * widened(up[i]));
    }
}

static inline void turn(const uint16_t *restrict from, const uint16_t *restrict cosine, const uint16_t *restrict sine,
                        uint16_t *restrict into, int64_t half)
{
    for (int64_t i = 0; i < half; i++)
        into[i] = narrowed(widened(from[i]) * widened(cosine[i]) + widened(from[i + half]) * widened(sine[i]));
    for (int64_t i = half; i < 2 * half; i++)
        into[i] = narrowed(widened(from[i]) * widened(cosine[i]) + widened(from[i - half]) * widened(sine[i]));
}

static void rotate_plain(const void *operation, int64_t row)
{
    const struct rotation *o = operation;
    const int64_t dim = o->dim, own = o->slots[row] * o->kv_heads * dim;
    const uint16_t *from = o->qkv + row * (o->heads + 2 * o->kv_heads) * dim;
    const uint16_t *cosine = o->cosine + row * dim, *sine = o->sine + row * dim;
    for (int64_t head = 0; head < o->heads; head++, from += dim)
        turn(from, cosine, sine, o->query + (row * o->heads + head) * dim, dim / 2);
    for (int64_t head = 0; head < o->kv_heads; head++, from += dim)
        turn(from, cosine, sine, o->key_cache + own + head * dim, dim / 2);
    memcpy(o->value_cache + own, from, (size_t)(o->kv_heads * dim) * sizeof *from);
}

#define KERNELS {{tile_4, tile_6, tile_8}, round_plain, norm_plain, gate_plain, rotate_plain, STEP_KERNELS}
