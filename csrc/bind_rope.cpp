// Python bindings of rotary positions: checks and pointers only.
#if defined(HQ_HAVE_CUDA)
#include "rope.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "arguments.h"

namespace py = pybind11;
using namespace py::literals;
using namespace hq::arguments;

namespace {

hq::Rope make_rope(const std::vector<float>& frequencies) {
  HQ_REQUIRE(frequencies.size() <= hq::kMostPairs, "a head has " + text(frequencies.size()) +
                                                       " pairs, must have at most " + text(hq::kMostPairs));
  hq::Rope rope{static_cast<int>(frequencies.size()), {}};
  for (size_t i = 0; i < frequencies.size(); ++i) rope.frequency[i] = frequencies[i];
  return rope;
}

// Address, then the strides of sequences, positions and heads.
using Part = std::array<int64_t, 4>;

hq::Heads make_heads(const Part& part, bool empty, const char* name) {
  HQ_REQUIRE(part[0] != 0 || empty, std::string(name) + " is 0 but there are elements");
  check_aligned(static_cast<uintptr_t>(part[0]), 16, name);
  for (int i = 1; i < 4; ++i)
    HQ_REQUIRE(part[i] % 8 == 0, std::string(name) + ": stride is " + text(part[i]) + ", must be a multiple of 8");
  return {pointer<void>(static_cast<uintptr_t>(part[0])), part[1], part[2], part[3]};
}

// sizes: sequences, positions, heads and width.
hq::RopeCall make_call(const hq::Rope& rope, const std::vector<Part>& from, const std::vector<Part>& to,
                       const std::array<int64_t, 4>& sizes, bool back) {
  const auto [sequences, positions, heads, width] = sizes;
  HQ_REQUIRE(from.size() == to.size() && (from.size() == 2 || from.size() == 3),
             "got " + text(from.size()) + " parts from and " + text(to.size()) + " to, must be 2 or 3 of both");
  check_shape(sequences, positions);
  HQ_REQUIRE(heads >= 0 && heads < (1 << 24), "heads is " + text(heads) + ", must be >= 0 and less than 2^24");
  HQ_REQUIRE(width > 0 && width % 8 == 0 && width < (1 << 24),
             "width is " + text(width) + ", must be a multiple of 8, above 0 and less than 2^24");
  HQ_REQUIRE(rope.pairs == 0 || 2 * rope.pairs == width,
             "heads of " + text(width) + " elements do not have " + text(rope.pairs) + " pairs");
  hq::RopeCall call{static_cast<int>(from.size()), {}, {}, sequences, positions, static_cast<int>(heads),
                    static_cast<int>(width), back};
  const bool empty = sequences == 0 || positions == 0 || heads == 0;
  for (size_t i = 0; i < from.size(); ++i)
    call.from[i] = make_heads(from[i], empty, "from"), call.to[i] = make_heads(to[i], empty, "to");
  return call;
}

}  // namespace

namespace hq {

void bind_rope(py::module_& m) {
  py::class_<Rope>(m, "Rope", "The frequencies of the pairs of a head; made once, used in many calls.")
      .def(py::init(&make_rope), "frequencies"_a);
  m.def("rope_cuda", [](const Rope& rope, const std::vector<Part>& from, const std::vector<Part>& to,
                        const std::array<int64_t, 4>& sizes, bool back, uintptr_t stream) {
    rope_cuda(make_call(rope, from, to, sizes, back), rope, stream);
  }, "rope"_a, "from_"_a, "to"_a, "sizes"_a, "back"_a = false, "stream"_a = 0,
     "Heads of q, k and, with three parts, v go from their places to others, and q and k turn by their positions; back: "
     "the other way. A part: address and strides of sequences, positions and heads; sizes: of these, and of a head.");
}

}  // namespace hq
#endif
