//! The types of matrix elements: floats, and blocks of quantised weights.

use half::{bf16, f16};

/// Element type of a [`Matrix`](crate::Matrix).
///
/// Weights can have any type. Hidden states and logits are bf16, f16 or f32. `I8` and `F8_E4M3` are for weights with
/// [scales](crate::Matrix::with_scales). The block types are those of GGUF files, with the names and layouts of ggml. A
/// block holds [`DType::block_elements`] consecutive weights of a row in [`DType::block_bytes`] bytes, little-endian:
///
/// | type | elements | bytes | value of a weight |
/// | --- | ---: | ---: | --- |
/// | `Q8_0` | 32 | 34 | `d q`, q of 8 bits |
/// | `Q4_0` | 32 | 18 | `d (q - 8)`, q of 4 bits |
/// | `IQ4_NL` | 32 | 18 | `d t[q]`, a table t of 16 integers |
/// | `MXFP4` | 32 | 17 | `2^(e - 128) t[q]`, a table t of 16 integers |
/// | `Q4_K` | 256 | 144 | `d s q - d' m`, s and m of 6 bits for 32 weights |
/// | `Q5_K` | 256 | 176 | the same, q of 5 bits |
/// | `Q6_K` | 256 | 210 | `d s (q - 32)`, q of 6 bits, s of 8 bits for 16 weights |
///
/// A weight is exactly this real number. `d` and `d'` have type f16, `e` is a byte, and the other letters are integers. For
/// `MXFP4` this holds for every `e`, as in ggml: e = 255 is not a NaN, unlike in OCP Microscaling. From e = 253 on, the
/// largest weights overflow float32, where they are infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(non_camel_case_types, reason = "the names of ggml")]
pub enum DType {
    /// bfloat16.
    BF16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// 8-bit integers.
    I8,
    /// 8-bit floats with 4 bits of exponent (OCP FP8): no infinities, 0x7f and 0xff are NaN.
    F8_E4M3,
    /// 8-bit integers, one scale for 32 weights.
    Q8_0,
    /// 4-bit integers, one scale for 32 weights.
    Q4_0,
    /// 4-bit indices into a table, one scale for 32 weights.
    IQ4_NL,
    /// 4-bit floats (e2m1), one power of two for 32 weights (OCP Microscaling 1.0).
    MXFP4,
    /// 4-bit integers, a scale and a minimum for 32 weights.
    Q4_K,
    /// 5-bit integers, a scale and a minimum for 32 weights.
    Q5_K,
    /// 6-bit integers, a scale for 16 weights.
    Q6_K,
}

impl DType {
    /// All types.
    pub const ALL: [DType; 12] = [
        DType::BF16,
        DType::F16,
        DType::F32,
        DType::I8,
        DType::F8_E4M3,
        DType::Q8_0,
        DType::Q4_0,
        DType::IQ4_NL,
        DType::MXFP4,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ];

    /// Elements of a block; 1 for types without blocks.
    pub const fn block_elements(self) -> usize {
        match self {
            DType::BF16 | DType::F16 | DType::F32 | DType::I8 | DType::F8_E4M3 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::IQ4_NL | DType::MXFP4 => 32,
            DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
        }
    }

    /// Bytes of a block; for types without blocks, bytes of an element.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::BF16 | DType::F16 => 2,
            DType::F32 => 4,
            DType::I8 | DType::F8_E4M3 => 1,
            DType::Q8_0 => 34,
            DType::Q4_0 | DType::IQ4_NL => 18,
            DType::MXFP4 => 17,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
        }
    }

    /// Bytes of `elements` elements, a multiple of [`DType::block_elements`]; `None` on overflow.
    pub const fn bytes(self, elements: usize) -> Option<usize> {
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// Whether the type is bf16, f16 or f32, as hidden states and logits are.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::BF16 | DType::F16 | DType::F32)
    }

    /// Whether weights of the type have [scales](crate::Matrix::with_scales).
    pub const fn is_scaled(self) -> bool {
        matches!(self, DType::I8 | DType::F8_E4M3)
    }

    /// Whether every weight of the type is exact in float32, except beyond its range. Scaled types, `Q4_K` and `Q5_K` need
    /// float64.
    pub const fn is_exact_in_f32(self) -> bool {
        !matches!(self, DType::Q4_K | DType::Q5_K) && !self.is_scaled()
    }

    /// The code of the type in messages between ranks: its index in [`DType::ALL`].
    pub fn code(self) -> u8 {
        DType::ALL.iter().position(|dtype| *dtype == self).map_or(u8::MAX, |at| at as u8)
    }

    /// The lower-case name: that of ggml for block types, that of safetensors for the others.
    pub const fn name(self) -> &'static str {
        match self {
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::F32 => "f32",
            DType::I8 => "i8",
            DType::F8_E4M3 => "f8_e4m3",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::IQ4_NL => "iq4_nl",
            DType::MXFP4 => "mxfp4",
            DType::Q4_K => "q4_k",
            DType::Q5_K => "q5_k",
            DType::Q6_K => "q6_k",
        }
    }
}

/// A Rust type that a [`Matrix`](crate::Matrix) can hold.
pub trait Element: bytemuck::Pod {
    /// The element type at run time.
    const DTYPE: DType;

    /// Widens to float32, exactly.
    fn widen(self) -> f32;
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    fn widen(self) -> f32 {
        // `to_f32` has a branch for NaN.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}
impl Element for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}
