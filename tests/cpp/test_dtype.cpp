// Every 16-bit value survives the way to float32 and back; rounding is to the nearest value, ties to even.
#include <cmath>
#include <cstdio>
#include <utility>

#include "../../csrc/dtype.h"

using namespace lora_stream;

namespace {

int failures = 0;

template <class T>
void check_round_trip(const char* name) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const T value{static_cast<uint16_t>(bits)};
    T back;
    store_as(&back, to_float(value));
    const bool nan = std::isnan(to_float(value));
    if (nan ? !std::isnan(to_float(back)) : back.bits != value.bits) {
      ++failures;
      std::printf("FAILED %s: 0x%04x came back as 0x%04x\n", name, bits, static_cast<unsigned>(back.bits));
    }
  }
}

// Between neighbours a < b: everything below the middle goes to a, above to b, the middle to the even one.
template <class T>
void check_rounding(const char* name, uint32_t infinity) {
  for (uint32_t bits = 0; bits + 1 < infinity; ++bits) {
    const T low{static_cast<uint16_t>(bits)}, high{static_cast<uint16_t>(bits + 1)};
    const float middle = to_float(low) + (to_float(high) - to_float(low)) / 2;
    const float below = std::nextafterf(middle, 0.0f), above = std::nextafterf(middle, INFINITY);
    const T even = bits % 2 == 0 ? low : high;
    for (const auto& [x, expected] : {std::pair<float, T>{below, low}, {middle, even}, {above, high}}) {
      for (const float sign : {1.0f, -1.0f}) {
        T got;
        store_as(&got, sign * x);
        const uint16_t want = static_cast<uint16_t>(expected.bits | (sign < 0 ? 0x8000u : 0u));
        const float rounded = round_to(sign * x, static_cast<T*>(nullptr));
        if (got.bits != want || float_bits(rounded) != float_bits(to_float(T{want}))) {
          ++failures;
          std::printf("FAILED %s: %a gave 0x%04x, expected 0x%04x\n", name, sign * x, static_cast<unsigned>(got.bits),
                      static_cast<unsigned>(want));
        }
      }
    }
  }
}

}  // namespace

int main() {
  check_round_trip<BFloat16>("bfloat16");
  check_round_trip<Float16>("float16");
  check_rounding<BFloat16>("bfloat16", 0x7f80);
  check_rounding<Float16>("float16", 0x7c00);
  if (failures == 0) std::printf("conversions are exact\n");
  return failures != 0;
}
