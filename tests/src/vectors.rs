//! The files of `vectors/`: known answers that every backend must reproduce, in every language.
//!
//! The files are lines of fields separated by blanks; `#` begins a comment. Numbers with `0x` are hexadecimal, and
//! floats are written as their bits.

/// `vectors/philox4x32.txt`, in Random123's `kat_vectors` format:
/// `philox4x32 rounds c0 c1 c2 c3 k0 k1 r0 r1 r2 r3`, hexadecimal without `0x`.
pub const PHILOX: &str = include_str!("../vectors/philox4x32.txt");
/// `vectors/gumbel.txt`, the map of groups and shards: `word refinement exponential_bits gumbel_bits`.
pub const GUMBEL: &str = include_str!("../vectors/gumbel.txt");
/// `vectors/granule.txt`, the map of tokens:
/// `granule_word refinement token_word leader minimum_bits exponential_bits gumbel_bits`. The last two fields belong to
/// a token other than the leader.
pub const GRANULE: &str = include_str!("../vectors/granule.txt");
/// `vectors/noise.txt`: `seed position draw token gumbel_bits` of the token domain.
pub const NOISE: &str = include_str!("../vectors/noise.txt");
/// `vectors/value_stability.txt`: `scheme seed position draw token`.
pub const VALUE_STABILITY: &str = include_str!("../vectors/value_stability.txt");

/// `vectors/blocks.txt`: `type blocks digest`, digests of the weights of quantised blocks.
pub const BLOCKS: &str = include_str!("../vectors/blocks.txt");
/// `vectors/ggml_rounding.txt`: `type case scale_bits hidden_bits codes`, hidden states that ggml rounds to 8 bits.
pub const GGML_ROUNDING: &str = include_str!("../vectors/ggml_rounding.txt");

/// Returns the fields of every line that has fields.
pub fn lines(file: &str) -> impl Iterator<Item = Vec<&str>> {
    file.lines()
        .map(|line| line.split('#').next().unwrap_or_default().split_ascii_whitespace().collect())
        .filter(|fields: &Vec<&str>| !fields.is_empty())
}

/// Parses a decimal number, or a hexadecimal number with `0x`.
///
/// # Panics
/// Panics on other text, because the vectors are part of the source.
pub fn number(field: &str) -> u64 {
    match field.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => field.parse(),
    }
    .unwrap_or_else(|e| panic!("{field}: {e}"))
}
