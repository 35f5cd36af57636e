#!/bin/sh
# Each tool of compute-sanitizer over one case of every operator and path. Memory is not cached, so that a read beyond a
# tensor is one beyond an allocation; kernels are compiled before, so that compiling is not watched.
PYTHON=${PYTHON:-python}
if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not on the PATH (it comes with the CUDA toolkit): nothing was checked" >&2
  exit 2
fi
paths="random_steps or (large_budgets and 172) or (shares and 33) or little_shared_memory
  or (two_stages_of_coded_keys and int4) or every_operator_that_runs or dense_requests or stages-independent-per_head
  or (experts_of_deepseek and dtype0-0-8) or (mla_inputs and 1-16) or (gqa_inputs and 1) or (softmax_router and dtype0-1)
  or (products_of_a_few_tokens and sizes0-8)"
export CASES=${CASES:-30} PYTORCH_NO_CUDA_MEMORY_CACHING=1
watched() {
  "$@" $PYTHON -m pytest -q -x -m gpu tests/gpu/test_random_steps.py tests/gpu/test_kernels.py tests/gpu/test_dense.py \
    tests/gpu/test_paged.py tests/gpu/test_experts.py tests/gpu/test_step_kernels.py -k "$(echo $paths)"
}
watched || exit
for tool in ${TOOLS:-memcheck racecheck initcheck}; do
  echo "== $tool"
  watched compute-sanitizer --tool $tool --error-exitcode 9 --launch-timeout 0 --target-processes application-only || exit
done
