/* How work is divided among threads, and the choice of instructions. */

#ifndef HOLDFAST_THREADS_H
#define HOLDFAST_THREADS_H

#include "integer.h"

/* GOMP_parallel of the OpenMP library that PyTorch has loaded: runs `work` in each thread of its team. */
typedef void run_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* The code of a level of instructions; NULL for one that does not exist. */
const struct kernels *holdfast_kernels(int level);

#endif
