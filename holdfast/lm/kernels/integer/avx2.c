/* Products with AVX2: 32 products at a time, in sums of 16 bits that cannot overflow. */

#include <immintrin.h>
#include "plain.h"

enum { FLOATS = 8, COLUMNS = 1, STREAMS = 8, WEIGHT_ROWS = 4, DOT_ROWS = 2 };

#include "step.h"

#define INLINE static inline __attribute__((always_inline))

INLINE __m256i load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

INLINE __m256 halves(const uint8_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

INLINE __m256i four(const int8_t *from)
{
    int32_t value;
    memcpy(&value, from, 4);
    return _mm256_set1_epi32(value);
}

/* The eight vectors of a block for eight of the rows, whose numbers begin at `from`; those of 8 bits with their sign. */
INLINE void unpack(int bits, const uint8_t *from, __m256i *vectors)
{
    const __m256i low = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(48), sign = _mm256_set1_epi8(-128);
    if (bits == 8) {
        for (int v = 0; v < 8; v++)
            vectors[v] = _mm256_xor_si256(load(from + 64 * v), sign);
        return;
    }
    for (int v = 0; v < 4; v++) {
        __m256i pair = load(from + 64 * v);
        vectors[2 * v] = _mm256_and_si256(pair, low);
        vectors[2 * v + 1] = _mm256_and_si256(_mm256_srli_epi16(pair, 4), low);
    }
    if (bits == 4)
        return;
    for (int h = 0; h < 2; h++) {
        __m256i high = load(from + 256 + 64 * h), *own = vectors + 4 * h;
        own[0] = _mm256_or_si256(own[0], _mm256_and_si256(_mm256_slli_epi16(high, 4), upper));
        own[1] = _mm256_or_si256(own[1], _mm256_and_si256(_mm256_slli_epi16(high, 2), upper));
        own[2] = _mm256_or_si256(own[2], _mm256_and_si256(high, upper));
        own[3] = _mm256_or_si256(own[3], _mm256_and_si256(_mm256_srli_epi16(high, 2), upper));
    }
}

/* Sums of neighbouring products in 16 bits: at most 2 * 127 * 15, 63 or 128, which is below 2**15. */
INLINE __m256i pairs(int bits, __m256i vector, __m256i numbers)
{
    if (bits < 8)
        return _mm256_maddubs_epi16(vector, numbers);
    return _mm256_maddubs_epi16(_mm256_abs_epi8(vector), _mm256_sign_epi8(numbers, vector));
}

INLINE __m256i dot(int bits, const __m256i *vectors, const int8_t *numbers, int count)
{
    const int together = bits == 4 ? 8 : bits == 6 ? 2 : 1;  /* how many such sums fit into 16 bits */
    __m256i sum = _mm256_setzero_si256();
    for (int v = 0; v < count; v += together) {
        __m256i part = pairs(bits, vectors[v], four(numbers + 4 * v));
        for (int next = v + 1; next < v + together; next++)
            part = _mm256_add_epi16(part, pairs(bits, vectors[next], four(numbers + 4 * next)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
    }
    return sum;
}

INLINE void multiply(int bits, int half, int n, const uint8_t *tile, int64_t blocks, struct batch a, float *out)
{
    const int size = bits == 4 ? 320 : bits == 6 ? 448 : 544, header = bits == 8 ? 32 : 64;
    __m256 sums[ROWS];
    for (int row = 0; row < n; row++)
        sums[row] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        __m256i vectors[8];
        const __m256 scale = halves(tile + 16 * half), other = bits == 8 ? scale : halves(tile + 32 + 16 * half);
        unpack(bits, tile + header + 32 * half, vectors);
        for (int row = 0; row < n; row++) {
            const int8_t *numbers = a.numbers + INPUTS * row;
            const int32_t *starts = a.starts + row;
            __m256 found;
            if (bits == 6) {
                __m256i first = _mm256_add_epi32(_mm256_set1_epi32(starts[0]), dot(bits, vectors, numbers, 4));
                __m256i second = _mm256_add_epi32(_mm256_set1_epi32(starts[n]), dot(bits, vectors + 4, numbers + 16, 4));
                found = _mm256_mul_ps(_mm256_cvtepi32_ps(first), scale);
                found = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), other, found);
            } else if (bits == 4) {
                found = _mm256_mul_ps(other, _mm256_set1_ps(a.totals[row]));
                found = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot(bits, vectors, numbers, 8)), scale, found);
            } else {
                found = _mm256_mul_ps(_mm256_cvtepi32_ps(dot(bits, vectors, numbers, 8)), scale);
            }
            sums[row] = _mm256_fmadd_ps(found, _mm256_set1_ps(a.scales[row]), sums[row]);
        }
        tile += size, a.numbers += INPUTS * n, a.scales += n, a.starts += 2 * n, a.totals += n;
    }
    for (int row = 0; row < n; row++)
        _mm256_storeu_ps(out + TILE * row + 8 * half, sums[row]);
}

#define KERNEL(bits)                                                                                         \
    static void tile_##bits(const uint8_t *tile, int64_t blocks, int n, struct batch batch, float *out)      \
    {                                                                                                        \
        multiply(bits, 0, n, tile, blocks, batch, out);                                                      \
        multiply(bits, 1, n, tile, blocks, batch, out);                                                      \
    }

KERNEL(4)
KERNEL(6)
KERNEL(8)

INLINED float total(vec numbers)
{
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)numbers), _mm256_extractf128_ps((__m256)numbers, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

const struct kernels holdfast_avx2 = KERNELS;
