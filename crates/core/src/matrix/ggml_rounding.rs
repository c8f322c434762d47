//! The rounding of hidden states in ggml, for draws from ggml's distribution.

use super::DType;
use half::{bf16, f16};

/// Rounds a hidden state as ggml does before a product with a weight of this type.
///
/// This project never rounds hidden states to 8 bits. ggml (llama.cpp) rounds them to 8 bits per block for quantised
/// weights, and to the weight's type for bf16 and f16. Its logits are the dot products of the rounded hidden state, up
/// to the rounding of float32 sums. A hidden state that this function has rounded gives ggml's distribution of tokens.
///
/// The rounding is that of ggml's generic code: `quantize_row_q8_0` for blocks of 32 weights, `quantize_row_q8_K` for
/// blocks of 256. Its vector code may round a tie differently. Elements beyond the last whole block stay as they are.
pub fn round_as_ggml(weight: DType, hidden: &mut [f32]) {
    match weight {
        DType::BF16 => hidden.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        DType::F16 => hidden.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        DType::F32 => {}
        _ if weight.block_elements() == 32 => hidden.as_chunks_mut::<32>().0.iter_mut().for_each(round_32),
        _ => hidden.as_chunks_mut::<256>().0.iter_mut().for_each(round_256),
    }
}

/// Rounds to 8-bit integers times an f16 scale, the largest absolute value divided by 127. Ties round away from zero.
fn round_32(block: &mut [f32; 32]) {
    let scale = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let stored = f16::from_f32(scale).to_f32();
    block.iter_mut().for_each(|x| *x = (*x * inverse).round() * stored);
}

/// Rounds to 8-bit integers times an f32 scale. The element with the largest absolute value becomes -127. Ties round to
/// even.
fn round_256(block: &mut [f32; 256]) {
    let largest = block.iter().fold(0.0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    if largest == 0.0 {
        return block.fill(0.0);
    }
    let inverse = -127.0 / largest;
    block.iter_mut().for_each(|x| *x = (*x * inverse).round_ties_even().min(127.0) * (1.0 / inverse));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_rounded_to_8_bits_of_their_largest_element() {
        let states: Vec<f32> = (0..256).map(|i| (i as f32 * 0.77).sin() * (1 + i / 32) as f32).collect();
        for (weight, block) in [(DType::Q8_0, 32), (DType::MXFP4, 32), (DType::Q6_K, 256)] {
            let mut rounded = states.clone();
            round_as_ggml(weight, &mut rounded);
            for (before, after) in states.chunks(block).zip(rounded.chunks(block)) {
                let largest = before.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let step = largest / 127.0;
                assert!(before.iter().zip(after).all(|(b, a)| (b - a).abs() <= 0.51 * step + largest * 1e-3));
                let codes: std::collections::BTreeSet<i32> = after.iter().map(|a| (a / step).round() as i32).collect();
                assert!(codes.len() > block / 4 && codes.iter().all(|c| c.abs() <= 127));
            }
        }
        let mut rounded = states.clone();
        round_as_ggml(DType::F32, &mut rounded);
        assert_eq!(rounded, states);
        let mut zeros = [0.0; 256];
        round_as_ggml(DType::Q4_K, &mut zeros);
        assert_eq!(zeros, [0.0; 256]);
    }
}
