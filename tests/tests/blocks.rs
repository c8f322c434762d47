//! Comparison with ggml's own code: the weights of quantised blocks (every factor and every code of every type), and the
//! rounding of hidden states.

use flash_sampling_conformance::data::hash;
use flash_sampling_conformance::vectors::{BLOCKS, GGML_ROUNDING, lines, number};
use flash_sampling_core::{DType, Matrix, f16, round_as_ggml};

/// The blocks of `vectors/blocks.py`.
fn blocks(seed: u64, dtype: DType, count: usize) -> Vec<u8> {
    let size = dtype.block_bytes();
    let factors: &[usize] = match dtype {
        DType::MXFP4 => &[],
        DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q6_K => &[208],
        _ => &[0],
    };
    let mut bytes: Vec<u8> = (0..(count * size) as u64).map(|i| hash(seed, i) as u8).collect();
    for (n, block) in bytes.chunks_exact_mut(size).enumerate() {
        for (&at, factor) in factors.iter().zip([1, 40_503]) {
            block[at..at + 2].copy_from_slice(&((n * factor) as u16).to_le_bytes());
        }
    }
    bytes
}

/// The digest of weights, as in `vectors/blocks.py`.
fn digest(weights: &[f32]) -> u64 {
    let bits = weights.iter().map(|w| if w.is_nan() { 0x7fc0_0000 } else { w.to_bits() });
    (0u64..).zip(bits).fold(0, |sum, (i, bits)| sum.wrapping_add((2 * i + 1).wrapping_mul(u64::from(bits))))
}

#[test]
fn weights_have_the_bits_of_the_reference_decoder() {
    let mut types = 0;
    for (seed, fields) in (0..).zip(lines(BLOCKS)) {
        let [name, count, expected] = fields[..] else { panic!("{fields:?}") };
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name).expect("a known type");
        let (count, expected) = (number(count) as usize, number(expected));
        let mut bytes = blocks(seed, dtype, count);
        let cols = count * dtype.block_elements();
        let mut weights = vec![0.0; cols];
        Matrix::from_bytes(&bytes, dtype, 1, cols, cols).unwrap().row_to_f32(0, &mut weights);
        assert_eq!(digest(&weights), expected, "{name}");
        // One other code changes the digest.
        bytes[(count / 4 + 7) * dtype.block_bytes() + 16] ^= 0x11;
        Matrix::from_bytes(&bytes, dtype, 1, cols, cols).unwrap().row_to_f32(0, &mut weights);
        assert_ne!(digest(&weights), expected, "{name}");
        types += 1;
    }
    assert_eq!(types, DType::ALL.iter().filter(|dtype| dtype.block_elements() > 1).count());
}

/// The numbers of `digits` hexadecimal digits each.
fn numbers(field: &str, digits: usize) -> Vec<u32> {
    let parse = |digits: &[u8]| u32::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    field.as_bytes().chunks_exact(digits).map(parse).collect()
}

/// The cases have ties, a scale that is a subnormal f16, and scales that have more bits than an f16.
#[test]
fn hidden_states_round_to_the_codes_and_scales_of_ggml() {
    let mut cases = [0; 2];
    for fields in lines(GGML_ROUNDING) {
        let [rounding, case, scale, hidden, codes] = fields[..] else { panic!("{fields:?}") };
        let bits = number(scale) as u32;
        let (weights, scale): (&[DType], f32) = match rounding {
            "q8_0" => (&[DType::Q8_0, DType::Q4_0, DType::IQ4_NL, DType::MXFP4], f16::from_bits(bits as u16).to_f32()),
            "q8_k" => (&[DType::Q4_K, DType::Q5_K, DType::Q6_K], f32::from_bits(bits)),
            other => panic!("{other}"),
        };
        let hidden: Vec<f32> = numbers(hidden, 8).into_iter().map(f32::from_bits).collect();
        // ggml has no negative zero, so values are compared instead of bits.
        let want: Vec<f32> = numbers(codes, 2).into_iter().map(|code| scale * f32::from(code as u8 as i8)).collect();
        for weight in weights {
            let mut found = hidden.clone();
            round_as_ggml(*weight, &mut found);
            assert_eq!(found, want, "{case}, {}", weight.name());
        }
        cases[usize::from(rounding == "q8_k")] += 1;
    }
    assert_eq!(cases, [12, 8]);
}
