// The types that the tensor cores multiply.
#pragma once

namespace flash_sampling::ptx {

enum class Operand { BF16, F16, S8 };

}  // namespace flash_sampling::ptx
