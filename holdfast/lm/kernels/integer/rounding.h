/* Rounding of activations, in plain C that compilers turn into each file's vectors. */

#include <math.h>
#include <string.h>
#include "integer.h"

/* Adding it rounds a number below 2**22 to an integer, which then stands in the low bits. */
static const float MAGIC = 12582912.0f;

static float rounded(const float *from, int8_t *numbers)
{
    uint32_t bits[INPUTS], largest = 0;
    memcpy(bits, from, sizeof bits);
    for (int i = 0; i < INPUTS; i++) {
        uint32_t size = bits[i] & 0x7fffffff;  /* sizes order as their bits do, and infinity and NaN come last */
        largest = size > largest ? size : largest;
    }
    float most;
    memcpy(&most, &largest, sizeof most);
    float inverse = most < 1e-30f || largest >= 0x7f800000 ? 0.0f : 127.0f / most;
    for (int i = 0; i < INPUTS; i++) {
        float shifted = (inverse == 0.0f ? 0.0f : from[i] * inverse) + MAGIC;
        int32_t number;
        memcpy(&number, &shifted, sizeof number);
        numbers[i] = (int8_t)number;
    }
    return largest >= 0x7f800000 ? NAN : inverse == 0.0f ? 0.0f : most / 127.0f;
}
