/* The operations of a layer on rows of bfloat16, divided among the threads by rows. */

#include <stdatomic.h>
#include <stdlib.h>
#include "integer.h"
#include "threads.h"

enum { FEW = 1 << 15 };

struct rows {
    of_row *work;
    const void *operation;
    int64_t count;
    atomic_int_fast64_t next;
};

static void some_rows(void *data)
{
    struct rows *rows = data;
    for (;;) {
        const int64_t row = atomic_fetch_add(&rows->next, 1);
        if (row >= rows->count)
            return;
        rows->work(rows->operation, row);
    }
}

static void all_rows(of_row *work, const void *operation, int64_t count, int64_t width, run_parallel *parallel, int threads)
{
    struct rows rows = {.work = work, .operation = operation, .count = count};
    atomic_init(&rows.next, 0);
    if (parallel && threads > 1 && count > 1 && count * width >= FEW)
        parallel(some_rows, &rows, (unsigned)threads, 0);
    else
        some_rows(&rows);
}

/* These return 0, or 1 for an argument that they do not take. */

int holdfast_norm(const struct norm *norm, int64_t rows, run_parallel *parallel, int threads, int level)
{
    const struct kernels *kernels = holdfast_kernels(level);
    if (!kernels || norm->width < 1)
        return 1;
    all_rows(kernels->norm, norm, rows, norm->width, parallel, threads);
    return 0;
}

int holdfast_gate(const struct gate *gate, int64_t rows, run_parallel *parallel, int threads, int level)
{
    const struct kernels *kernels = holdfast_kernels(level);
    if (!kernels || gate->width < 1)
        return 1;
    all_rows(kernels->gate, gate, rows, 4 * gate->width, parallel, threads);
    return 0;
}

/* `places` is the number of slots of each cache. Nothing is written if one of the rows' slots is not among them. */
int holdfast_rotate(const struct rotation *rotation, int64_t rows, int64_t places, run_parallel *parallel, int threads,
                    int level)
{
    const struct kernels *kernels = holdfast_kernels(level);
    if (!kernels || rotation->dim < 2 || rotation->dim % 2)
        return 1;
    for (int64_t row = 0; row < rows; row++)
        if (rotation->slots[row] < 0 || rotation->slots[row] >= places)
            return 1;
    const int64_t width = (rotation->heads + 2 * rotation->kv_heads) * rotation->dim;
    all_rows(kernels->rotate, rotation, rows, width, parallel, threads);
    return 0;
}
