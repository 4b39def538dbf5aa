/* What the files of this folder share: the layout of packed weights and of rounded activations.

A tile has 16 rows of a weight. For each block of 32 inputs it holds the scales of its rows in float16, then their
numbers. A vector of numbers has four neighbouring inputs of each of the 16 rows, a byte for each: 64 bytes, eight of
them for a block.

    bits  bytes  a block of a tile
    4     320    16 scales, 16 lows, 4 vectors of pairs: inputs 8 v to 8 v + 3 in the low bits, 8 v + 4 to 8 v + 7 above
    6     448    16 scales of inputs 0 to 15, 16 of the others, the low 4 bits as above, 2 vectors of high bits: vector
                 4 h + f has its two bits in field f of vector h
    8     544    16 scales, 8 vectors

The weight is (number - offset) * scale * the row's factor, with offsets of 0, 32 and 128; of 4 bits the low is added
to number * scale before the factor. */

#ifndef HOLDFAST_INTEGER_H
#define HOLDFAST_INTEGER_H

#include <stdbool.h>
#include <stdint.h>

enum { TILE = 16, INPUTS = 32, ROWS = 8, FORMS = 3 };

/* Activations, rounded to 8 bits with a scale for each 32 inputs. Rows lie in batches of ROWS; the last has the rest.
Batch b of n rows begins at row ROWS * b; within it the order is [block of inputs][row]. */
struct batch {
    const int8_t *numbers;  /* [blocks][n][32] */
    const float *scales;    /* [blocks][n] */
    const int32_t *starts;  /* [blocks][2][n]: what an inner product of each half of a block begins at, for the offset */
    const float *totals;    /* [blocks][n]: sum of the numbers */
};

/* Products of n rows with a tile of 16, before the factors of its rows: out [n][16]. */
typedef void multiply_tile(const uint8_t *tile, int64_t blocks, int n, struct batch batch, float *out);

/* Round a block of 32 numbers and return its scale: NaN if one of them is not finite. */
typedef float round_block(const float *from, int8_t *numbers);

/* The operations of a layer on rows of bfloat16. Arithmetic is in float32, and results are rounded once. */

struct norm {  /* stream [rows, width] += added [rows, width]; out = its RMS norm times weight [width] */
    uint16_t *stream, *out;
    const uint16_t *added;  /* or NULL */
    const uint16_t *weight;
    int64_t width;
    float eps;
};

struct gate {  /* out [rows, width] = SiLU of the first half of both [rows, 2 width], times the second half */
    const uint16_t *both;
    uint16_t *out;
    int64_t width;
};

struct rotation {  /* Queries to `query` [rows, heads, dim]; keys and values to their slot [kv_heads, dim] of a cache */
    const uint16_t *qkv;             /* [rows, heads + 2 kv_heads, dim] */
    const uint16_t *cosine, *sine;   /* [rows, dim], the sine negative in the first half */
    const int64_t *slots;            /* [rows] */
    uint16_t *query, *key_cache, *value_cache;
    int64_t heads, kv_heads, dim;
};

/* A decoder for whole steps (step.c). Sizes are numbers, unless they say otherwise. Small tensors are
float32; plain weights and caches are float32, or bfloat16 if `half`. A tensor that the architecture lacks is NULL. */

enum { SILU, GELU_TANH };

struct matrix {
    const void *data;      /* [inputs, outputs]; [outputs, inputs] if by_rows; tiles if `bits` */
    const float *bias;     /* [outputs] */
    const float *factors;  /* of each row of the tiles; NULL for plain numbers */
    int64_t outputs, inputs, by_rows;
    int64_t bits;          /* of packed weights: 4, 6 or 8; 0 for plain numbers */
};

/* Weights of the same inputs, whose outputs follow each other. Those of all parts but the last are multiples of 16. */
struct projection {
    const struct matrix *parts;
    int64_t count, outputs;
    int64_t packed;        /* whether a part has `bits` */
};

struct layer {
    struct projection qkv, o, gate_up, down;
    const float *input_norm, *post_norm;              /* [hidden]; NULL: the stream is read as it is */
    const float *attention_out_norm, *mlp_out_norm;  /* [hidden] */
    const float *q_norm, *k_norm;  /* [dim] */
    const float *sinks;            /* [heads] */
    int64_t window;                /* positions that a token sees; 0: all */
    int64_t chunked, rotation;     /* rotation: index of `frequencies` */
};

struct decoder {
    const struct layer *layers;
    struct projection head;
    const float *final_norm;
    const float *frequencies[2], *amplitudes[2];  /* [dim / 2] */
    int64_t count, hidden, inner, heads, kv_heads, dim, activation, half;
    float eps, scale, softcap;  /* softcap: 0 for none */
};

/* LoRA adapters of a projection by slot. Slot s adds scale * B A x to each part of the outputs. Strides are numbers. */
struct adapted {
    const void *a;             /* [slots, parts, ranks, inputs], float32, or bfloat16 if `half` */
    const void *b;             /* [slots, ranks, outputs], likewise */
    const int32_t *rank;       /* [slots, parts]: rows of A and B that are read */
    const float *scale;        /* [slots, parts] */
    int64_t slot_stride, part_stride, table_stride;  /* of a and b between slots; of a between parts; of the tables */
    int64_t parts, ranks, inputs, outputs;
    int64_t ends[4];           /* the end of each part among the outputs */
};

enum { QKV, O, GATE_UP, DOWN, PROJECTIONS };

struct step {
    const void *stream;        /* [rows, hidden]: the embeddings */
    const int64_t *positions, *slots, *table_rows;  /* [rows] */
    const int32_t *tables;     /* [table_count, table_width] */
    const int64_t *sample_at;  /* [samples]; NULL: all rows */
    void *const *caches;       /* keys and values of each layer, [blocks, block_size, kv_heads, dim] */
    void *logits;              /* [samples, outputs of the head]; NULL: only `normed` is computed */
    float *normed;             /* [samples, hidden]: the final norm's output, which the head reads; or NULL */
    void *taps;                /* [rows, tap_count, hidden]: the stream as it enters some layers; NULL: not wanted */
    const int64_t *tap_layers; /* [tap_count]: these layers, ascending */
    const struct adapted *adapted;  /* [layers][PROJECTIONS]; NULL: no row has an adapter */
    const int64_t *adapter_of; /* [rows]: the slot of each row's adapter, -1 for none */
    void *scratch;             /* holdfast_step_bytes of bytes, at a multiple of 64 */
    int64_t rows, samples, blocks, block_size, table_count, table_width;
    int64_t longest;           /* one more than the largest position */
    int64_t tap_count;
    int64_t wide;              /* whether logits are float32 whatever the weights are */
    int64_t adapter_slots, low_width;  /* slots of `adapted`; the largest parts * ranks of `adapted` */
};

struct step_kernels {
    /* out [rows, columns] = x times some outputs of a weight, plus the bias */
    void (*multiply)(const struct matrix *weight, bool half, int64_t first, int64_t columns, const float *x,
                     int64_t x_stride, int64_t rows, float *out, int64_t out_stride);
    void (*norm)(const float *from, const float *weight, int64_t width, float eps, float *out);
    void (*gate)(int64_t activation, const float *gate, const float *up, int64_t width, float *out);
    void (*turn)(float *head, const float *weight, const float *cosine, const float *sine, int64_t dim, float eps);
    bool (*attend)(const struct decoder *decoder, const struct step *step, int64_t layer, int64_t row, int64_t head,
                   int64_t count, const float *query, float *scores, float *out);
    void (*widen)(const uint16_t *from, int64_t count, float *into);
    void (*narrow)(const float *from, int64_t count, uint16_t *into);
};

typedef void of_row(const void *operation, int64_t row);

struct kernels {
    multiply_tile *tiles[FORMS];  /* of 4, 6 and 8 bits */
    round_block *round;
    of_row *norm, *gate, *rotate;  /* of struct norm, struct gate and struct rotation */
    struct step_kernels step;
};

extern const struct kernels holdfast_portable, holdfast_avx2, holdfast_avx512;

#endif
