// Bindings of rows of a table and of its gradient (csrc/embedding.h).
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "embedding.h"

namespace py = pybind11;
using namespace py::literals;

namespace hq {

using namespace arguments;

namespace {

// Rows of `bytes`, of a table of which each of `ranks` has `entries`.
void check_table(int64_t rows, int64_t entries, int64_t bytes, int64_t ranks, int64_t rank) {
  HQ_REQUIRE(bytes >= 0 && bytes % kBytesOfRowWord == 0,
             "a row has " + text(bytes) + " bytes, must be whole words of " + text(kBytesOfRowWord));
  HQ_REQUIRE(ranks > 0 && rank >= 0 && rank < ranks,
             "rank is " + text(rank) + " of " + text(ranks) + ", must be one of them");
  HQ_REQUIRE(ranks < int64_t{1} << 20, "there are " + text(ranks) + " ranks, must be fewer than 2^20");
  check_shape(rows * ranks, bytes);
  check_shape(entries * ranks, bytes);
}

void check_rows(uintptr_t address, int64_t count, const char* name) {
  HQ_REQUIRE(count == 0 || address, std::string(name) + " is 0 only without elements");
  check_aligned(address, kBytesOfRowWord, name);
}

}  // namespace

void bind_embedding(py::module_& m) {
  m.def("embed_cuda", [](uintptr_t tokens, uintptr_t table, uintptr_t received, uintptr_t out, int64_t rows,
                         int64_t entries, int64_t bytes, int64_t ranks, int64_t rank, uintptr_t stream) {
    check_table(rows, entries, bytes, ranks, rank);
    HQ_REQUIRE(rows == 0 || tokens, "tokens is 0 only without rows");
    check_aligned(tokens, 8, "tokens");
    check_rows(table, entries, "table");
    check_rows(out, rows, "out");
    check_aligned(received, kBytesOfRowWord, "received");
    embed_cuda({pointer<int64_t>(tokens), pointer<void>(table), pointer<void>(received), pointer<void>(out), rows,
                entries, bytes, ranks, rank}, stream);
  }, "tokens"_a, "table"_a, "received"_a, "out"_a, "rows"_a, "entries"_a, "bytes"_a, "ranks"_a = 1, "rank"_a = 0,
     "stream"_a = 0,
     "The rows of tokens in a table, on the current GPU; of one that ranks share, those of this rank's entries, and the\n"
     "others' of received.");
  m.def("rows_of_rank_cuda", [](uintptr_t tokens, uintptr_t from, uintptr_t out, int64_t rows, int64_t entries,
                                int64_t bytes, int64_t rank, uintptr_t stream) {
    check_table(rows, entries, bytes, rank + 1, rank);
    HQ_REQUIRE(rows == 0 || tokens, "tokens is 0 only without rows");
    check_aligned(tokens, 8, "tokens");
    check_rows(from, rows, "from");
    check_rows(out, rows, "out");
    rows_of_rank_cuda({pointer<int64_t>(tokens), pointer<void>(from), pointer<void>(out), rows, entries, bytes, rank},
                      stream);
  }, "tokens"_a, "from"_a, "out"_a, "rows"_a, "entries"_a, "bytes"_a, "rank"_a, "stream"_a = 0,
     "Copies the rows of tokens whose entry a rank has, on the current GPU.");
  m.def("embedding_gradient_cuda", [](uintptr_t tokens, uintptr_t order, uintptr_t starts, uintptr_t own,
                                      uintptr_t received, int dtype, uintptr_t table, int64_t rows, int64_t entries,
                                      int64_t width, int64_t ranks, int64_t rank, uintptr_t stream) {
    HQ_REQUIRE(dtype == 0 || dtype == 1, "dtype of the rows is " + text(dtype) + ", must be 0 (fp32) or 1 (bf16)");
    const auto of = static_cast<Dtype>(dtype);
    HQ_REQUIRE(width >= 0 && width < int64_t{1} << 31, "width is " + text(width) + ", must be >= 0 and below 2^31");
    check_table(rows, entries, width * static_cast<int64_t>(bytes_of(of)), ranks, rank);
    HQ_REQUIRE((rows == 0 || (tokens && order)) && starts, "tokens, order or starts are at address 0");
    check_aligned(tokens | order | starts, 8, "the least of tokens, order and starts");
    check_rows(own, rows, "own");
    check_rows(table, entries, "table");
    HQ_REQUIRE(rows == 0 || received || ranks == 1, "received is 0 only for one rank");
    check_aligned(received, kBytesOfRowWord, "received");
    embedding_gradient_cuda({pointer<int64_t>(tokens), pointer<int64_t>(order), pointer<int64_t>(starts),
                             pointer<void>(own), pointer<void>(received), of, pointer<float>(table), rows, entries, ranks,
                             rank, static_cast<int>(width)}, stream);
  }, "tokens"_a, "order"_a, "starts"_a, "own"_a, "received"_a, "dtype"_a, "table"_a, "rows"_a, "entries"_a, "width"_a,
     "ranks"_a = 1, "rank"_a = 0, "stream"_a = 0,
     "The gradient of a table, in float32, of the gradients of the rows of tokens, on the current GPU.");
}

}  // namespace hq
