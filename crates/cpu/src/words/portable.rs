//! Sixteen lanes in plain Rust.

use super::{BLOCKS, Lanes, SPAN};

/// Plain Rust.
pub(crate) struct Portable;

impl Lanes for Portable {
    type Words = [u64; BLOCKS];

    #[inline(always)]
    unsafe fn splat(word: u32) -> Self::Words {
        [u64::from(word); BLOCKS]
    }
    #[inline(always)]
    unsafe fn count_from(first: u32) -> Self::Words {
        core::array::from_fn(|i| u64::from(first.wrapping_add(i as u32)))
    }
    #[inline(always)]
    unsafe fn multiply(a: Self::Words, b: Self::Words) -> Self::Words {
        core::array::from_fn(|i| (a[i] & 0xffff_ffff) * (b[i] & 0xffff_ffff))
    }
    #[inline(always)]
    unsafe fn high(a: Self::Words) -> Self::Words {
        a.map(|x| x >> 32)
    }
    #[inline(always)]
    unsafe fn xor3(a: Self::Words, b: Self::Words, c: Self::Words) -> Self::Words {
        core::array::from_fn(|i| a[i] ^ b[i] ^ c[i])
    }
    #[inline(always)]
    unsafe fn any_at_most(words: &[Self::Words; 4], limit: u32) -> bool {
        words.iter().flatten().any(|&w| w as u32 <= limit)
    }
    #[inline(always)]
    unsafe fn largest(logits: &[f32; SPAN]) -> f32 {
        logits.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
    }
    #[inline(always)]
    unsafe fn at_least(logits: &[f32; SPAN], cut: f32) -> u64 {
        logits.iter().enumerate().fold(0, |hits, (i, &logit)| hits | u64::from(logit >= cut) << i)
    }
    #[inline(always)]
    unsafe fn to_array(a: Self::Words) -> [u32; BLOCKS] {
        a.map(|w| w as u32)
    }
}
