// The scalar functions of numerics.h over arrays, so that tests can go through every code and every edge.
#include "numerics.h"
#include "quantize.h"

namespace hq {
namespace {

template <class E>
void encode_all(const float* source, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(encode<E>(source[i]));
}

template <class E>
void decode_all(const uint8_t* codes, float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = decode<E>(codes[i] & ((1u << E::kWidth) - 1));
}

}  // namespace

void encode_elements(Element element, const float* source, uint8_t* codes, int64_t n) {
  switch (element) {
    case Element::e4m3: return encode_all<E4M3>(source, codes, n);
    case Element::e5m2: return encode_all<E5M2>(source, codes, n);
    case Element::e2m1: return encode_all<E2M1>(source, codes, n);
    case Element::e2m3: return encode_all<E2M3>(source, codes, n);
    case Element::e3m2: return encode_all<E3M2>(source, codes, n);
    case Element::e1m2: return encode_all<E1M2>(source, codes, n);
    case Element::int8: return encode_all<INT8>(source, codes, n);
  }
}

void decode_elements(Element element, const uint8_t* codes, float* values, int64_t n) {
  switch (element) {
    case Element::e4m3: return decode_all<E4M3>(codes, values, n);
    case Element::e5m2: return decode_all<E5M2>(codes, values, n);
    case Element::e2m1: return decode_all<E2M1>(codes, values, n);
    case Element::e2m3: return decode_all<E2M3>(codes, values, n);
    case Element::e3m2: return decode_all<E3M2>(codes, values, n);
    case Element::e1m2: return decode_all<E1M2>(codes, values, n);
    case Element::int8: return decode_all<INT8>(codes, values, n);
  }
}

void e8m0_up_elements(const float* source, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(e8m0_up(source[i]));
}

void e8m0_elements(ScaleRounding rounding, Element element, const float* amax, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(e8m0_scale_of(element, rounding, amax[i]));
}

void stochastic_e2m1_elements(const float* source, const uint8_t* random, uint8_t* codes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(encode_e2m1_stochastic(source[i], random[i]));
}

}  // namespace hq
