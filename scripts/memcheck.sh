#!/usr/bin/env bash
# Run small tests of every kernel under compute-sanitizer's memcheck, in parallel. Prints each result; exits 1 if one fails.
# usage: scripts/memcheck.sh [LOG [PART...]]     on a CUDA device; PYTHON names the interpreter
set -uo pipefail
cd "$(dirname "$0")/.."
log=${1:-memcheck.log}; shift || true; chosen=" $* "; parts=$(mktemp -d); trap 'rm -rf "$parts"' EXIT
# Without PyTorch's caching allocator each tensor is its own allocation, so memcheck sees any access past its end.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1
check() {  # NAME, then what pytest runs
  local name=$1; shift
  [[ $chosen == "  " || $chosen == *" $name "* ]] || return
  compute-sanitizer --tool memcheck --error-exitcode 9 \
    "${PYTHON:-python3}" -m pytest -o addopts= -p no:cacheprovider "$@" > "$parts/$name" 2>&1
  echo $? > "$parts/$name.rc"
}
long=tests/lm/kernels/attention/test_paged.py::test_long_segments_over_a_context_cut_in_parts_compiled
check prefill-and-merge "$long[None-False-None-128-16]" "$long[3.0-True-100-64-32]" &
check decode-merge-and-write tests/lm/kernels/attention/test_paged.py \
  -k "reserved_metadata_serves or skips_padding or compiled_kernels and options0-14-2-64-32-dtype0" &
check swap tests/lm/kernels/cache/test_kv_cache.py tests/lm/execution/test_transfer.py -k "the_kernel or a_gpu" &
check sampling tests/lm/kernels/sampling/test_sample.py tests/lm/kernels/sampling/test_argmax.py -k "the_kernel or argmax or nan" &
check rotation-with-write tests/lm/kernels/linear/test_layers.py -k "rotation and 14-2-128-16 and dtype1 or padding_is_not" &
check fp8-products tests/lm/kernels/test_fp8.py -k "parts_add_up and 50-208 or two_fp8_numbers or before_bias" &
check recurrent tests/lm/kernels/recurrent/test_triton_recurrence.py \
  -k "mixed_batch or no_powers_of_two or any_width or compiled_kernels and 48-40-dtype0" &
check step-inputs tests/lm/kernels/cache/test_step_inputs.py &
wait
worst=0
for part in "$parts"/*.rc; do
  name=$(basename "$part" .rc); code=$(cat "$part")
  passed=$(grep -hoE '[0-9]+ passed[^=]*' "$parts/$name") && [ "$code" = 0 ] || worst=1
  echo "== $name: exit code $code; ${passed:-none passed}; $(grep -h 'ERROR SUMMARY' "$parts/$name")"
  sed 's/^/   /' "$parts/$name"
done > "$log"
grep '^==' "$log"
exit $worst
