//! The arguments of the fused kernels.

use crate::abi::{DeviceAddress, Draw, Row, RowFilters, layout};
use flash_sampling_core::DType;

/// The transform from dot products to raw logits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HeadTransform {
    /// 0 = none.
    pub(crate) soft_cap: f32,
    pub(crate) scale: f32,
}
layout!(HeadTransform 8: soft_cap 0, scale 4);

impl HeadTransform {
    /// The identity: dot products are raw logits.
    pub(crate) const NONE: HeadTransform = HeadTransform { soft_cap: 0.0, scale: 1.0 };
}

/// A word in device memory that decides whether a launch ends at once: if it has this value. Null: never.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SkipIf {
    pub(crate) word: DeviceAddress<u32>,
    pub(crate) value: u32,
    pub(crate) zero: u32,
}
layout!(SkipIf 16: word 0, value 8, zero 12);

impl SkipIf {
    /// The launch ends at once if `word` is `value`.
    pub(crate) fn new(word: DeviceAddress<u32>, value: u32) -> SkipIf {
        SkipIf { word, value, zero: 0 }
    }
}

/// The head and the batch of one launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) bias: DeviceAddress<f32>,
    pub(crate) best: DeviceAddress<u64>,
    pub(crate) invalid: DeviceAddress<u64>,
    pub(crate) logits: DeviceAddress<f32>,
    pub(crate) arrived: DeviceAddress<u32>,
    pub(crate) draws: DeviceAddress<Draw>,
    pub(crate) head: HeadTransform,
    pub(crate) row_count: u32,
    pub(crate) hidden: u32,
    pub(crate) first_token: u32,
    pub(crate) tokens: u32,
    /// The fused kernels read it.
    pub(crate) skip_if: SkipIf,
}
layout!(Call 96:
    rows 0, bias 8, best 16, invalid 24, logits 32, arrived 40, draws 48, head 56, row_count 64, hidden 68,
    first_token 72, tokens 76, skip_if 80
);

/// The scales of a weight of 8-bit elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightScales {
    /// Null = every scale is 1.
    pub(crate) values: DeviceAddress<f32>,
    pub(crate) block_rows: u32,
    pub(crate) block_cols: u32,
    pub(crate) row_blocks: u32,
    /// The row of the weight's first row in its block of rows.
    pub(crate) first_row: u32,
}
layout!(WeightScales 24: values 0, block_rows 8, block_cols 12, row_blocks 16, first_row 20);

/// The two factors in device memory, in any layout.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) weight: DeviceAddress<u8>,
    pub(crate) hidden: DeviceAddress<u8>,
    /// Bytes between rows.
    pub(crate) weight_stride: u64,
    pub(crate) hidden_stride: u64,
    /// The code of [`element`].
    pub(crate) weight_type: u32,
    pub(crate) hidden_type: u32,
    /// Bytes read at once: a power of two up to 16 that divides address and stride.
    pub(crate) weight_unit: u32,
    pub(crate) hidden_unit: u32,
    pub(crate) scales: WeightScales,
}
layout!(Matrices 72:
    weight 0, hidden 8, weight_stride 16, hidden_stride 24, weight_type 32, hidden_type 36, weight_unit 40,
    hidden_unit 44, scales 48
);

/// The output for logits, `[rows, tokens]`; 0 = none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogitStore {
    pub(crate) logits: DeviceAddress<f32>,
    /// Floats between rows.
    pub(crate) stride: u64,
    /// The largest logit of each granule, if the kernel stores it: block_maxima.cuh.
    pub(crate) block_maxima: DeviceAddress<u16>,
    /// 1: the portable kernels store raw logits, as the Hopper kernels always do. 0: transformed logits.
    pub(crate) is_raw: u32,
    pub(crate) padding: u32,
    /// The Hopper kernels store only octets of rows in which a row has a filter. Null: all rows.
    pub(crate) filters: DeviceAddress<RowFilters>,
}
layout!(LogitStore 40: logits 0, stride 8, block_maxima 16, is_raw 24, padding 28, filters 32);

/// Bytes of the largest logits of granules, `[octets of rows, granules, 8]` of 16 bits.
pub(crate) fn block_maxima_bytes(rows: usize, tokens: usize) -> usize {
    2 * rows.next_multiple_of(8) * tokens.div_ceil(16)
}

/// A tensor map, which the driver encodes.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

/// The tensors of one launch as boxes, as in load.cuh, and the scales of a weight in fp8: one for each of its rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maps {
    pub(crate) weight: TensorMap,
    pub(crate) granule: TensorMap,
    pub(crate) hidden: TensorMap,
    pub(crate) scales: WeightScales,
    /// The size of a map is a multiple of its alignment.
    pub(crate) padding: [u64; 5],
}
layout!(Maps 448: weight 0, granule 128, hidden 256, scales 384);

/// Returns the kernels' code of a type.
pub(crate) fn element(dtype: DType) -> u32 {
    dtype.code().into()
}

/// Returns the kernels' name of a float type.
pub(crate) fn element_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::F32 => "F32",
        DType::I8 => "S8",
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
