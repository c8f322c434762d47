//! The files of `vectors/`: what every backend, in every language, must reproduce.
//!
//! All of them are lines of fields separated by blanks; `#` begins a comment. Numbers with leading `0x` are
//! hexadecimal; floats are given by their bits.

/// `vectors/philox4x32.txt`, in Random123's `kat_vectors` format:
/// `philox4x32 rounds c0 c1 c2 c3 k0 k1 r0 r1 r2 r3`, hexadecimal without `0x`.
pub const PHILOX: &str = include_str!("../vectors/philox4x32.txt");
/// `vectors/gumbel.txt`, the map of groups and shards: `word refinement exponential_bits gumbel_bits`.
pub const GUMBEL: &str = include_str!("../vectors/gumbel.txt");
/// `vectors/granule.txt`, the map of tokens:
/// `granule_word refinement token_word leader minimum_bits exponential_bits gumbel_bits`. The last two are those of a token
/// that is not the leader.
pub const GRANULE: &str = include_str!("../vectors/granule.txt");
/// `vectors/noise.txt`: `seed position draw token gumbel_bits` of the token domain.
pub const NOISE: &str = include_str!("../vectors/noise.txt");
/// `vectors/value_stability.txt`: `scheme seed position draw token`.
pub const VALUE_STABILITY: &str = include_str!("../vectors/value_stability.txt");

/// The fields of every line that holds some.
pub fn lines(file: &str) -> impl Iterator<Item = Vec<&str>> {
    file.lines()
        .map(|line| line.split('#').next().unwrap_or_default().split_ascii_whitespace().collect())
        .filter(|fields: &Vec<&str>| !fields.is_empty())
}

/// A decimal number, or a hexadecimal one with `0x`.
///
/// # Panics
/// When it is neither: the vectors are part of the source.
pub fn number(field: &str) -> u64 {
    match field.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => field.parse(),
    }
    .unwrap_or_else(|e| panic!("{field}: {e}"))
}
