//! The codes and the scales of each type in memory.

use flash_sampling_core::DType;
use flash_sampling_core::backend::{E2M1, IQ4_NL};
use std::sync::LazyLock;

/// The code of least absolute value: 0, but 1 for `IQ4_NL`.
pub(super) fn least_code(dtype: DType) -> i32 {
    i32::from(dtype == DType::IQ4_NL)
}

/// Sets the scale `2^log` of the weights from `i` on.
pub(super) fn set_scale(dtype: DType, block: &mut [u8], i: usize, log: usize) {
    let scale = 1u8 << log;
    match dtype {
        DType::Q6_K => block[192 + i / 16] = scale,
        DType::Q4_K | DType::Q5_K => {
            let minimum = scale * if dtype == DType::Q4_K { 8 } else { 16 };
            let (span, bytes) = (i / 32, &mut block[4..16]);
            if span < 4 {
                bytes[span] |= scale;
                bytes[span + 4] |= minimum;
            } else {
                bytes[span + 4] |= scale & 15 | minimum << 4;
                bytes[span - 4] |= scale >> 4 << 6;
                bytes[span] |= minimum >> 4 << 6;
            }
        }
        _ => {}
    }
}

/// Flips the bits of `code` in weight `i` of a block.
pub(super) fn flip_code(dtype: DType, block: &mut [u8], i: usize, code: i32) {
    let nibble = |at: usize, high: bool, code: i32| (at, (code as u8 & 15) << if high { 4 } else { 0 });
    let index =
        |table: [i8; 16]| table.into_iter().position(|t| i32::from(t) == code).expect("a code of the table") as i32;
    let (at, bits) = match dtype {
        DType::Q8_0 => (2 + i, code as u8),
        DType::Q4_0 => nibble(2 + i % 16, i >= 16, code + 8),
        DType::IQ4_NL => nibble(2 + i % 16, i >= 16, index(IQ4_NL)),
        DType::MXFP4 => nibble(1 + i % 16, i >= 16, index(E2M1)),
        DType::Q4_K => nibble(16 + i / 64 * 32 + i % 32, i / 32 % 2 == 1, code + 8),
        DType::Q5_K => {
            block[16 + i % 32] ^= ((code + 16) as u8 >> 4) << (i / 32);
            nibble(48 + i / 64 * 32 + i % 32, i / 32 % 2 == 1, code + 16)
        }
        _ => {
            let (half, part) = (i / 128, i / 32 % 4);
            block[128 + half * 32 + i % 32] ^= ((code + 32) as u8 >> 4) << (2 * part);
            nibble(half * 64 + part % 2 * 32 + i % 32, part >= 2, code + 32)
        }
    };
    block[at] ^= bits;
}

/// The `F8_E4M3` of `code * 2^shift`, for codes of up to 4 bits.
pub(super) fn e4m3(code: i32, shift: i32) -> u8 {
    // In units of the least positive value, 2^-9.
    let size = code.unsigned_abs() << (shift + 9);
    let bits = match size.checked_ilog2() {
        None | Some(0..3) => size,
        Some(log) => (log - 2) << 3 | (size >> (log - 3) & 7),
    };
    bits as u8 | if code < 0 { 0x80 } else { 0 }
}

/// The last slots of [`table_codes`], whose codes come from a search.
pub(super) const TABLE_SLOTS: usize = 4;
/// All sums of [`TABLE_SLOTS`] codes are below this in absolute value.
const LIMIT: i32 = 127 * 15 + 1;

/// Calls `set` with slots and codes of `IQ4_NL` whose sum of `2^-slot * code` is `w`. The choice varies, so that all
/// codes of the table are used.
pub(super) fn table_codes(w: f64, slots: usize, mut set: impl FnMut(usize, i32)) {
    /// For each sum of [`TABLE_SLOTS`] codes with the factors 8, 4, 2 and 1, the indices of these codes. If several
    /// choices have the same sum, the table has the choice of least absolute values, so that partial sums have few
    /// bits.
    static SUMS: LazyLock<Vec<Option<[usize; TABLE_SLOTS]>>> = LazyLock::new(|| {
        let mut sums = vec![(i32::MAX, None); 2 * LIMIT as usize];
        for all in 0..1usize << (4 * TABLE_SLOTS) {
            let codes = core::array::from_fn(|slot| all >> (4 * slot) & 15);
            let sum =
                |f: fn(i32) -> i32| codes.iter().fold(0, |sum, code: &usize| 2 * sum + f(i32::from(IQ4_NL[*code])));
            let (at, size) = ((sum(|code| code) + LIMIT) as usize, sum(i32::abs));
            if size < sums[at].0 {
                sums[at] = (size, Some(codes));
            }
        }
        sums.into_iter().map(|(_, codes)| codes).collect()
    });
    let scaled = w * 2f64.powi(slots as i32 - 1);
    assert_eq!(scaled.fract(), 0.0, "{w} needs more than {slots} slots");
    let mut left = scaled as i64;
    let mut choice = (left as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // A code as odd as the rest leaves an even rest, which goes to the slots before.
    for slot in (TABLE_SLOTS..slots).rev() {
        let parity = |code: &&i8| (i64::from(**code) - left) % 2 == 0;
        let codes = IQ4_NL.iter().filter(parity).count();
        choice = choice.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let code = *IQ4_NL.iter().filter(parity).nth((choice >> 33) as usize % codes).expect("a code of the table");
        set(slot, i32::from(code));
        left = (left - i64::from(code)) / 2;
    }
    let sum = usize::try_from(left + i64::from(LIMIT)).ok().and_then(|at| *SUMS.get(at)?);
    for (slot, code) in sum.unwrap_or_else(|| panic!("{w} is no sum of {slots} codes")).into_iter().enumerate() {
        set(slot, i32::from(IQ4_NL[code]));
    }
}
