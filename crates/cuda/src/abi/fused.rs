//! The arguments of the fused kernels.

use crate::abi::{DeviceAddress, Draw, Row, RowFilters, layout};
use flash_sampling_core::DType;

layout! {
    /// The transform from dot products to raw logits.
    #[derive(PartialEq)]
    pub(crate) struct HeadTransform = 8 {
        /// 0 = none.
        pub(crate) soft_cap: f32 = 0,
        pub(crate) scale: f32 = 4,
    }
}

impl HeadTransform {
    /// The identity: dot products are raw logits.
    pub(crate) const NONE: HeadTransform = HeadTransform { soft_cap: 0.0, scale: 1.0 };
}

layout! {
    /// A condition: a launch ends at once if the word at `word` has the value `value`. Null: it never does.
    #[derive(Default)]
    pub(crate) struct SkipIf = 16 {
        pub(crate) word: DeviceAddress<u32> = 0,
        pub(crate) value: u32 = 8,
        pub(crate) zero: u32 = 12,
    }
}

impl SkipIf {
    /// Creates the condition that `word` is `value`.
    pub(crate) fn new(word: DeviceAddress<u32>, value: u32) -> SkipIf {
        SkipIf { word, value, zero: 0 }
    }
}

layout! {
    /// The head and the batch of one launch.
    pub(crate) struct Call = 96 {
        pub(crate) rows: DeviceAddress<Row> = 0,
        pub(crate) bias: DeviceAddress<f32> = 8,
        pub(crate) best: DeviceAddress<u64> = 16,
        pub(crate) invalid: DeviceAddress<u64> = 24,
        pub(crate) logits: DeviceAddress<f32> = 32,
        pub(crate) arrived: DeviceAddress<u32> = 40,
        pub(crate) draws: DeviceAddress<Draw> = 48,
        pub(crate) head: HeadTransform = 56,
        pub(crate) row_count: u32 = 64,
        pub(crate) hidden: u32 = 68,
        pub(crate) first_token: u32 = 72,
        pub(crate) tokens: u32 = 76,
        /// A condition that the fused kernels check.
        pub(crate) skip_if: SkipIf = 80,
    }

    /// The scales of a weight of 8-bit elements.
    #[derive(Default)]
    pub(crate) struct WeightScales = 24 {
        /// Null = every scale is 1.
        pub(crate) values: DeviceAddress<f32> = 0,
        pub(crate) block_rows: u32 = 8,
        pub(crate) block_cols: u32 = 12,
        pub(crate) row_blocks: u32 = 16,
        /// The index of the weight's first row in the block of rows that has its scale.
        pub(crate) first_row: u32 = 20,
    }

    /// The two operands of the matmul in device memory, in any layout.
    pub(crate) struct Matrices = 72 {
        pub(crate) weight: DeviceAddress<u8> = 0,
        pub(crate) hidden: DeviceAddress<u8> = 8,
        /// Bytes between rows.
        pub(crate) weight_stride: u64 = 16,
        pub(crate) hidden_stride: u64 = 24,
        /// The code of [`element`].
        pub(crate) weight_type: u32 = 32,
        pub(crate) hidden_type: u32 = 36,
        /// Bytes read at once: a power of two up to 16 that divides address and stride.
        pub(crate) weight_unit: u32 = 40,
        pub(crate) hidden_unit: u32 = 44,
        pub(crate) scales: WeightScales = 48,
    }

    /// The output for logits, `[rows, tokens]`; 0 = none.
    #[derive(Default)]
    pub(crate) struct LogitStore = 40 {
        pub(crate) logits: DeviceAddress<f32> = 0,
        /// Floats between rows.
        pub(crate) stride: u64 = 8,
        /// The largest logit of each granule, if the kernel stores it: see block_maxima.cuh.
        pub(crate) block_maxima: DeviceAddress<u16> = 16,
        /// 1: the portable kernels store raw logits, as the Hopper kernels always do. 0: transformed logits.
        pub(crate) is_raw: u32 = 24,
        pub(crate) padding: u32 = 28,
        /// The Hopper kernels store the logits of eight rows only if one of these rows has a filter. Null: of all rows.
        pub(crate) filters: DeviceAddress<RowFilters> = 32,
    }
}

/// Returns the bytes of the largest logits of granules: `[rows / 8 rounded up, granules, 8]` of 16 bits.
pub(crate) fn block_maxima_bytes(rows: usize, tokens: usize) -> usize {
    2 * rows.next_multiple_of(8) * tokens.div_ceil(16)
}

/// A tensor map, which the driver encodes.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

layout! {
    /// The tensor maps of one launch (see load.cuh). For a weight of 8-bit elements, also the scales of its rows and the
    /// factors of the hidden states.
    #[derive(Default)]
    pub(crate) struct Maps = 448 {
        pub(crate) weight: TensorMap = 0,
        pub(crate) granule: TensorMap = 128,
        pub(crate) hidden: TensorMap = 256,
        pub(crate) scales: WeightScales = 384,
        pub(crate) factors: DeviceAddress<f32> = 408,
        /// The first row of `hidden` in bf16.
        pub(crate) bf16_row: u32 = 416,
        /// The size of a map is a multiple of its alignment.
        pub(crate) padding: [u32; 7],
    }

    /// The argument of `scale_hidden` (scaled_hidden.cuh).
    pub(crate) struct ScaledHidden = 48 {
        pub(crate) hidden: DeviceAddress<u8> = 0,
        /// Bytes between rows.
        pub(crate) hidden_stride: u64 = 8,
        /// `[2, copied_rows, stride]`: f16, then bf16.
        pub(crate) copies: DeviceAddress<u16> = 16,
        /// `[copied_rows]`.
        pub(crate) factors: DeviceAddress<f32> = 24,
        pub(crate) rows: u32 = 32,
        pub(crate) copied_rows: u32 = 36,
        pub(crate) width: u32 = 40,
        /// Elements between rows of copies.
        pub(crate) stride: u32 = 44,
    }
}

/// Returns the kernels' code of a type.
pub(crate) fn element(dtype: DType) -> u32 {
    dtype.code().into()
}

/// Returns the kernels' name of a float type, or of a type of 8-bit elements.
pub(crate) fn element_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::F32 => "F32",
        DType::I8 => "I8",
        DType::F8_E4M3 => "F8_E4M3",
        _ => unreachable!("no instance has this type, and samplers refuse input of this type"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::sources;

    #[test]
    fn the_kernels_have_the_codes_and_blocks_of_all_types() {
        let header = sources::texts().find(|text| text.contains("enum class Element")).unwrap();
        let (codes, rest) = header.split_once("enum class Element").unwrap().1.split_once("};").unwrap();
        let listed: Vec<_> = codes.lines().filter(|line| line.contains(" = ")).map(str::trim).collect();
        let name = |dtype: DType| dtype.name().to_uppercase();
        let want: Vec<_> = DType::ALL.map(|dtype| format!("{} = {},", name(dtype), element(dtype))).into();
        assert_eq!(listed, want);
        let bytes_of = |dtype| {
            let case = format!("case Element::{}:", name(dtype));
            let at = rest.find(&case).unwrap_or_else(|| rest.find("default:").unwrap());
            let number = rest[at..].split_once("return ").unwrap().1;
            number[..number.find(';').unwrap()].parse::<usize>().unwrap()
        };
        for dtype in DType::ALL {
            assert_eq!(bytes_of(dtype), dtype.block_bytes(), "{dtype:?}");
        }
    }
}
