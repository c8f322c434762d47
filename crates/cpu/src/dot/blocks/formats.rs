//! The block types as Rust types, so that a kernel exists for each.

use flash_sampling_core::DType;

/// A block type.
pub(crate) trait Format {
    const DTYPE: DType;
}

macro_rules! formats {
    ($($name:ident $dtype:ident),*) => {
        $(
            #[doc = concat!("`DType::", stringify!($dtype), "`.")]
            pub(crate) struct $name;
            impl Format for $name {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

formats!(Q8 Q8_0, Q4 Q4_0, Iq4Nl IQ4_NL, Mxfp4 MXFP4, Q4K Q4_K, Q5K Q5_K, Q6K Q6_K);

/// Calls `$call!(Format)` with the format of a block type. `$float` is the value for other types.
macro_rules! for_format {
    ($dtype:expr, $call:ident, $float:expr) => {{
        use crate::dot::blocks::formats::*;
        match $dtype {
            DType::Q8_0 => $call!(Q8),
            DType::Q4_0 => $call!(Q4),
            DType::IQ4_NL => $call!(Iq4Nl),
            DType::MXFP4 => $call!(Mxfp4),
            DType::Q4_K => $call!(Q4K),
            DType::Q5_K => $call!(Q5K),
            DType::Q6_K => $call!(Q6K),
            _ => $float,
        }
    }};
}
pub(crate) use for_format;
