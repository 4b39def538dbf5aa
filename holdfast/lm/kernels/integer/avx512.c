/* Products with AVX-512 and its instruction for 8-bit integers (VNNI): 64 products at a time. */

#include <immintrin.h>
#include "plain.h"

enum { FLOATS = 16, COLUMNS = 2, STREAMS = 16, WEIGHT_ROWS = 8, DOT_ROWS = 3 };

#include "step.h"

#define INLINE static inline __attribute__((always_inline))

INLINE __m512i load(const uint8_t *from) { return _mm512_loadu_si512(from); }

INLINE __m512 halves(const uint8_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

INLINE __m512i four(const int8_t *from)
{
    int32_t value;
    memcpy(&value, from, 4);
    return _mm512_set1_epi32(value);
}

/* The eight vectors of a block, whose numbers begin at `from`. */
INLINE void unpack(int bits, const uint8_t *from, __m512i *vectors)
{
    const __m512i low = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(48);
    if (bits == 8) {
        for (int v = 0; v < 8; v++)
            vectors[v] = load(from + 64 * v);
        return;
    }
    for (int v = 0; v < 4; v++) {
        __m512i pair = load(from + 64 * v);
        vectors[2 * v] = _mm512_and_si512(pair, low);
        vectors[2 * v + 1] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
    }
    if (bits == 4)
        return;
    for (int h = 0; h < 2; h++) {
        __m512i high = load(from + 256 + 64 * h), *own = vectors + 4 * h;
        own[0] = _mm512_or_si512(own[0], _mm512_and_si512(_mm512_slli_epi16(high, 4), upper));
        own[1] = _mm512_or_si512(own[1], _mm512_and_si512(_mm512_slli_epi16(high, 2), upper));
        own[2] = _mm512_or_si512(own[2], _mm512_and_si512(high, upper));
        own[3] = _mm512_or_si512(own[3], _mm512_and_si512(_mm512_srli_epi16(high, 2), upper));
    }
}

INLINE __m512i dot(__m512i sum, const __m512i *vectors, const int8_t *numbers, int count)
{
    for (int v = 0; v < count; v++)
        sum = _mm512_dpbusd_epi32(sum, vectors[v], four(numbers + 4 * v));
    return sum;
}

INLINE void multiply(int bits, int n, const uint8_t *tile, int64_t blocks, struct batch a, float *out)
{
    const int size = bits == 4 ? 320 : bits == 6 ? 448 : 544, header = bits == 8 ? 32 : 64;
    __m512 sums[ROWS];
    for (int row = 0; row < n; row++)
        sums[row] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        __m512i vectors[8];
        const __m512 scale = halves(tile), other = bits == 8 ? scale : halves(tile + 32);
        unpack(bits, tile + header, vectors);
        for (int line = 0; line < size; line += 64)
            _mm_prefetch((const char *)tile + 2048 + line, _MM_HINT_T0);
        for (int row = 0; row < n; row++) {
            const int8_t *numbers = a.numbers + INPUTS * row;
            const int32_t *starts = a.starts + row;
            const __m512 own = _mm512_set1_ps(a.scales[row]);
            __m512 found;
            if (bits == 6) {
                __m512i first = dot(_mm512_set1_epi32(starts[0]), vectors, numbers, 4);
                __m512i second = dot(_mm512_set1_epi32(starts[n]), vectors + 4, numbers + 16, 4);
                found = _mm512_mul_ps(_mm512_cvtepi32_ps(first), scale);
                found = _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), other, found);
            } else if (bits == 4) {
                __m512i whole = dot(_mm512_setzero_si512(), vectors, numbers, 8);
                found = _mm512_mul_ps(other, _mm512_set1_ps(a.totals[row]));
                found = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, found);
            } else {
                __m512i whole = dot(_mm512_set1_epi32(starts[0] + starts[n]), vectors, numbers, 8);
                found = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), scale);
            }
            sums[row] = _mm512_fmadd_ps(found, own, sums[row]);
        }
        tile += size, a.numbers += INPUTS * n, a.scales += n, a.starts += 2 * n, a.totals += n;
    }
    for (int row = 0; row < n; row++)
        _mm512_storeu_ps(out + TILE * row, sums[row]);
}

/* A copy for each number of rows keeps the sums in registers. */
#define OF_ROWS(bits, n) case n: multiply(bits, n, tile, blocks, batch, out); break;
#define KERNEL(bits)                                                                                         \
    static void tile_##bits(const uint8_t *tile, int64_t blocks, int n, struct batch batch, float *out)      \
    {                                                                                                        \
        switch (n) {                                                                                         \
            OF_ROWS(bits, 1) OF_ROWS(bits, 2) OF_ROWS(bits, 3) OF_ROWS(bits, 4)                              \
            OF_ROWS(bits, 5) OF_ROWS(bits, 6) OF_ROWS(bits, 7) OF_ROWS(bits, 8)                              \
        }                                                                                                    \
    }

KERNEL(4)
KERNEL(6)
KERNEL(8)

INLINED float total(vec numbers) { return _mm512_reduce_add_ps((__m512)numbers); }

const struct kernels holdfast_avx512 = KERNELS;
