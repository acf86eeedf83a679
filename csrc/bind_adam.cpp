// Binding of AdamW (csrc/adam.h).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "adam.h"
#include "arguments.h"

namespace py = pybind11;
using namespace py::literals;

namespace hq {

using namespace arguments;

namespace {

using Addresses = std::vector<uintptr_t>;

std::vector<AdamTensor> tensors_of(const Addresses& params, const Addresses& grads, const Addresses& exp_avgs,
                                   const Addresses& exp_avg_sqs, const Addresses& steps,
                                   const std::vector<int64_t>& counts) {
  const size_t number = counts.size();
  for (const Addresses* addresses : {&params, &grads, &exp_avgs, &exp_avg_sqs, &steps})
    HQ_REQUIRE(addresses->size() == number,
               "the lists have " + text(addresses->size()) + " and " + text(number) + " entries, one for each tensor");
  std::vector<AdamTensor> tensors;
  for (size_t i = 0; i < number; ++i) {
    HQ_REQUIRE(counts[i] >= 0 && counts[i] < kMostElements,
               "a count is " + text(counts[i]) + ", must be >= 0 and less than 2^59");
    HQ_REQUIRE(counts[i] == 0 || (params[i] && grads[i] && exp_avgs[i] && exp_avg_sqs[i] && steps[i]),
               "addresses are 0 only without elements");
    check_aligned(params[i] | grads[i] | exp_avgs[i] | exp_avg_sqs[i] | steps[i], 4, "an address");
    tensors.push_back({pointer<float>(params[i]), pointer<float>(grads[i]), pointer<float>(exp_avgs[i]),
                       pointer<float>(exp_avg_sqs[i]), pointer<float>(steps[i]), counts[i]});
  }
  return tensors;
}

}  // namespace

void bind_adam(py::module_& m) {
  m.def("adamw_cuda", [](const Addresses& params, const Addresses& grads, const Addresses& exp_avgs,
                         const Addresses& exp_avg_sqs, const Addresses& steps, const std::vector<int64_t>& counts,
                         uintptr_t lr, uintptr_t factor, double beta1, double beta2, double eps, double weight_decay,
                         uintptr_t stream) {
    const std::vector<AdamTensor> tensors = tensors_of(params, grads, exp_avgs, exp_avg_sqs, steps, counts);
    HQ_REQUIRE(lr != 0, "lr is 0");
    check_aligned(lr, 8, "lr");
    check_aligned(factor, 4, "factor");
    adamw_cuda(tensors, {pointer<double>(lr), pointer<float>(factor), beta1, beta2, eps, weight_decay}, stream);
  }, "params"_a, "grads"_a, "exp_avgs"_a, "exp_avg_sqs"_a, "steps"_a, "counts"_a, "lr"_a, "factor"_a, "beta1"_a,
     "beta2"_a, "eps"_a, "weight_decay"_a, "stream"_a = 0,
     "AdamW on float32 parameters, in place, on the current GPU; counts: the elements of each.");
}

}  // namespace hq
