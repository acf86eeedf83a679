// Products by cuBLASLt, which is taken from the process at run time: torch has loaded it, and the extension links to no
// part of torch. Declared here is what is used of its ABI, which versions 12 and 13 share (NVIDIA, "cuBLAS Library",
// section "Using the cuBLASLt API"). Sums are kept in fp32 where k is split: reductions in the output's dtype are refused.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda/check.cuh"
#include "product.h"

namespace hq {
namespace {

// ---- cuBLASLt's ABI --------------------------------------------------------------------------------------------------

using Status = int;
using Handle = void*;
using Object = void*;  // a descriptor of an operation, of a matrix or of preferences

constexpr Status kSuccess = 0, kNotSupported = 15;                                       // cublasStatus_t
constexpr int kCompute32F = 68;                                                          // cublasComputeType_t
constexpr int kPlain = 0, kTransposed = 1;                                               // cublasOperation_t
constexpr int kOnHost = 0, kOnDevice = 1;                                                // cublasLtPointerMode_t
constexpr int kPointerMode = 2, kTransposeA = 3, kTransposeB = 4;                        // cublasLtMatmulDescAttributes_t
constexpr int kBatchCount = 5, kBatchOffset = 6;                                         // cublasLtMatrixLayoutAttribute_t
constexpr int kMaxWorkspace = 1, kReductions = 3;                                        // cublasLtMatmulPreferenceAttributes_t
constexpr int kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8;
constexpr uint32_t kInComputeType = 2;                                                   // cublasLtReductionScheme_t

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

struct Library {
  size_t (*version)();
  Status (*create)(Handle*);
  Status (*operation_create)(Object*, int compute, int scale);
  Status (*operation_set)(Object, int attribute, const void*, size_t);
  Status (*operation_destroy)(Object);
  Status (*matrix_create)(Object*, int type, uint64_t rows, uint64_t cols, int64_t stride);
  Status (*matrix_set)(Object, int attribute, const void*, size_t);
  Status (*matrix_destroy)(Object);
  Status (*preference_create)(Object*);
  Status (*preference_set)(Object, int attribute, const void*, size_t);
  Status (*preference_destroy)(Object);
  Status (*heuristic)(Handle, Object operation, Object a, Object b, Object c, Object d, Object preference, int wanted,
                      Heuristic*, int* found);
  Status (*multiply)(Handle, Object operation, const void* alpha, const void* a, Object, const void* b, Object,
                     const void* beta, const void* c, Object, void* d, Object, const Algorithm*, void* workspace, size_t,
                     cudaStream_t);
};

template <class Function>
bool find(void* file, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(file, name));
  return function != nullptr;
}

Library open_library() {
  Library lt{};
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    void* file = dlopen(name, RTLD_NOW | RTLD_NOLOAD);  // what this process has loaded, and nothing else
    const bool all = file && find(file, "cublasLtGetVersion", lt.version) && find(file, "cublasLtCreate", lt.create) &&
                     find(file, "cublasLtMatmulDescCreate", lt.operation_create) &&
                     find(file, "cublasLtMatmulDescSetAttribute", lt.operation_set) &&
                     find(file, "cublasLtMatmulDescDestroy", lt.operation_destroy) &&
                     find(file, "cublasLtMatrixLayoutCreate", lt.matrix_create) &&
                     find(file, "cublasLtMatrixLayoutSetAttribute", lt.matrix_set) &&
                     find(file, "cublasLtMatrixLayoutDestroy", lt.matrix_destroy) &&
                     find(file, "cublasLtMatmulPreferenceCreate", lt.preference_create) &&
                     find(file, "cublasLtMatmulPreferenceSetAttribute", lt.preference_set) &&
                     find(file, "cublasLtMatmulPreferenceDestroy", lt.preference_destroy) &&
                     find(file, "cublasLtMatmulAlgoGetHeuristic", lt.heuristic) &&
                     find(file, "cublasLtMatmul", lt.multiply);
    if (all) return lt;
  }
  return Library{};
}

// All null where there is no library.
const Library& library() {
  static const Library lt = open_library();
  return lt;
}

void require(Status status, const char* call) {
  if (status != kSuccess)
    throw std::runtime_error(std::string("hqsweep._C.ProductPlan: ") + call + " of cuBLASLt returned status " +
                             std::to_string(status));
}

// One for each GPU, made once and kept. Threads may share it.
Handle handle_of(const Library& lt, int device) {
  static std::mutex mutex;
  static std::map<int, Handle> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  Handle& handle = handles[device];
  if (!handle) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // it may allocate, also while a graph is captured
    check(cudaThreadExchangeStreamCaptureMode(&mode), "ProductPlan");
    const Status status = lt.create(&handle);
    check(cudaThreadExchangeStreamCaptureMode(&mode), "ProductPlan");
    require(status, "cublasLtCreate");
  }
  return handle;
}

// A descriptor and how it is destroyed.
class Descriptor {
 public:
  explicit Descriptor(Status (*destroy)(Object)) : destroy_(destroy) {}
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (object) destroy_(object);
  }
  Object object = nullptr;

 private:
  Status (*destroy_)(Object);
};

template <class Value>
void set(Status (*setter)(Object, int, const void*, size_t), const Descriptor& to, int attribute, Value value) {
  require(setter(to.object, attribute, &value, sizeof(value)), "SetAttribute");
}

void make_matrix(const Library& lt, Descriptor& to, cudaDataType type, int64_t rows, int64_t cols, int64_t stride,
                 int64_t count, int64_t step) {
  require(lt.matrix_create(&to.object, type, rows, cols, stride), "cublasLtMatrixLayoutCreate");
  if (count == 1) return;
  set(lt.matrix_set, to, kBatchCount, static_cast<int32_t>(count));
  set(lt.matrix_set, to, kBatchOffset, step);
}

// ---- alpha and beta where the product reads them ---------------------------------------------------------------------

__global__ void store_alpha(const float* factor_a, const float* factor_b, float constant, float beta, float* alpha_beta) {
  float alpha = constant;
  if (factor_a && factor_b) alpha = __fmul_rn(__fmul_rn(*factor_a, *factor_b), constant);
  else if (factor_a) alpha = __fmul_rn(*factor_a, constant);
  else if (factor_b) alpha = __fmul_rn(*factor_b, constant);
  alpha_beta[0] = alpha, alpha_beta[1] = beta;
}

}  // namespace

struct ProductPlan::State {
  State(const Library& library, const ProductShape& shape, int device)
      : lt(library), accumulate(shape.accumulate), scaled(shape.scaled), operation(lt.operation_destroy),
        left(lt.matrix_destroy), right(lt.matrix_destroy), out(lt.matrix_destroy) {
    handle = handle_of(lt, device);
    require(lt.operation_create(&operation.object, kCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(lt.operation_set, operation, kPointerMode, scaled ? kOnDevice : kOnHost);
    // cuBLAS stores columns: it multiplies out.T [n, m] = b @ a.T. b [n, k] by rows is [k, n] by columns, to be turned; a
    // is [k, m] by columns as it stands. Turned matrices are the other way round.
    set(lt.operation_set, operation, kTransposeA, shape.b.turned ? kPlain : kTransposed);
    set(lt.operation_set, operation, kTransposeB, shape.a.turned ? kTransposed : kPlain);
    const auto [m, n, k, count] = std::array<int64_t, 4>{shape.m, shape.n, shape.k, shape.count};
    make_matrix(lt, left, CUDA_R_16BF, shape.b.turned ? n : k, shape.b.turned ? k : n, shape.b.stride, count, shape.b.step);
    make_matrix(lt, right, CUDA_R_16BF, shape.a.turned ? m : k, shape.a.turned ? k : m, shape.a.stride, count,
                shape.a.step);
    make_matrix(lt, out, shape.out_dtype == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_32F, n, m, n, count, m * n);
    choose(shape);
  }

  void choose(const ProductShape& shape) {
    Descriptor preference(lt.preference_destroy);
    require(lt.preference_create(&preference.object), "cublasLtMatmulPreferenceCreate");
    set(lt.preference_set, preference, kMaxWorkspace, static_cast<uint64_t>(shape.most_workspace));
    set(lt.preference_set, preference, kReductions, kInComputeType);
    set(lt.preference_set, preference, kAlignmentA, shape.b.alignment);
    set(lt.preference_set, preference, kAlignmentB, shape.a.alignment);
    set(lt.preference_set, preference, kAlignmentC, shape.out_alignment);
    set(lt.preference_set, preference, kAlignmentD, shape.out_alignment);
    std::array<Heuristic, kMostRanks> ranked{};
    int returned = 0;
    const Status status = lt.heuristic(handle, operation.object, left.object, right.object, out.object, out.object,
                                       preference.object, shape.rank + 1, ranked.data(), &returned);
    if (status != kNotSupported) require(status, "cublasLtMatmulAlgoGetHeuristic");
    const Heuristic& chosen = ranked[shape.rank];
    found = status == kSuccess && returned > shape.rank && chosen.state == kSuccess;
    algorithm = chosen.algorithm, workspace = chosen.workspace;
  }

  const Library& lt;
  bool accumulate, scaled;
  Descriptor operation, left, right, out;
  Handle handle = nullptr;
  bool found = false;
  Algorithm algorithm{};
  size_t workspace = 0;
};

ProductPlan::ProductPlan(const ProductShape& shape, int device) {
  const Library& lt = library();
  if (!lt.multiply) throw std::runtime_error("hqsweep._C.ProductPlan: this process has no cuBLASLt of version 12 or 13");
  state_ = std::make_unique<State>(lt, shape, device);
}
ProductPlan::~ProductPlan() = default;
bool ProductPlan::found() const { return state_->found; }
int64_t ProductPlan::workspace() const { return static_cast<int64_t>(state_->workspace); }

void ProductPlan::run(const ProductCall& call, uintptr_t stream) const {
  const State& plan = *state_;
  const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
  const float beta = plan.accumulate ? 1.0f : 0.0f;
  const float *alpha_at = &call.constant, *beta_at = &beta;
  if (plan.scaled) {
    float* stored = static_cast<float*>(call.scratch);
    store_alpha<<<1, 1, 0, queue>>>(call.factor_a, call.factor_b, call.constant, beta, stored);
    check(cudaGetLastError(), "ProductPlan");
    alpha_at = stored, beta_at = stored + 1;
  }
  void* workspace = static_cast<char*>(call.scratch) + kProductHead;
  require(plan.lt.multiply(plan.handle, plan.operation.object, alpha_at, call.b, plan.left.object, call.a,
                           plan.right.object, beta_at, call.out, plan.out.object, call.out, plan.out.object,
                           &plan.algorithm, workspace, plan.workspace, queue),
          "cublasLtMatmul");
}

int64_t product_library_version() { return library().multiply ? static_cast<int64_t>(library().version()) : 0; }

}  // namespace hq
