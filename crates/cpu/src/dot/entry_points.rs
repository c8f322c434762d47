//! The functions of an instruction set, written once.

/// Defines the functions of an instruction set, with its target features.
///
/// `$lanes<T>` multiplies a weight of type `T`, and `$lanes<$decoded>` multiplies blocks that `$spans<Format>` decodes.
/// `$mr`, `$nr` and `$m1` are the register block of `lanes::tile`. `$d` is a dollar sign, for macros in the macro.
macro_rules! entry_points {
    ($d:tt $(#[$target:meta])? $lanes:ident, $spans:ident of $decoded:ty, $mr:literal x $nr:literal, $m1:literal) => {
        /// Multiplies a tile; see [`lanes::tile`], and for blocks [`blocks::multiply`].
        ///
        /// # Safety
        /// The instruction set is available, and the requirements of [`lanes::tile`] hold.
        $(#[$target])?
        pub(super) unsafe fn tile(weight: &Matrix<'_>, hidden: PackedRows<'_>, out: &mut [f32]) {
            // SAFETY: by this function's contract.
            unsafe {
                match weight.dtype() {
                    DType::BF16 => lanes::tile::<$lanes<bf16>, $mr, $nr, $m1>(weight, hidden, out),
                    DType::F16 => lanes::tile::<$lanes<f16>, $mr, $nr, $m1>(weight, hidden, out),
                    DType::F32 => lanes::tile::<$lanes<f32>, $mr, $nr, $m1>(weight, hidden, out),
                    dtype => {
                        macro_rules! multiply {
                            ($d format:ident) => {
                                blocks::multiply::<$lanes<$decoded>, $spans<$d format>>(weight, hidden, out)
                            };
                        }
                        for_format!(dtype, multiply, unreachable!("{dtype:?} is a float"))
                    }
                }
            }
        }

        /// Decodes a quantised weight; see [`blocks::decode`].
        ///
        /// # Safety
        /// The instruction set is available.
        $(#[$target])?
        pub(super) unsafe fn decode(weight: &Matrix<'_>, stride: usize, out: &mut [f32]) {
            macro_rules! decode {
                ($d format:ident) => {
                    // SAFETY: by this function's contract, and the type is that of the weight.
                    unsafe { blocks::decode::<$lanes<$decoded>, $spans<$d format>>(weight, stride, out) }
                };
            }
            for_format!(weight.dtype(), decode, blocks::decode_scaled(weight, stride, out))
        }
    };
}
pub(super) use entry_points;
