//! Draws from a weight in fp8 or int8 with a scale for each row.

use super::{Launch, PROGRAM, input, is_wrong};
use crate::emulated::{self, Input};
use std::path::Path;

/// The variants of `Launch` for a weight of these types.
const F8_E4M3: u32 = 6;
const I8: u32 = 7;

/// A launch with a weight of 8-bit elements, and scales of its rows.
struct Scaled {
    /// The weight of this launch is the product of elements and scales.
    launch: Launch,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

/// Returns the value of a code of e4m3.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, mantissa) {
        (15, 7.0) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code < 128 { magnitude } else { -magnitude }
}

impl Scaled {
    /// Sets the weight of the launch from codes. Scales are powers of two and dot products are exact, so products of
    /// scales and sums are exact, too.
    fn new(mut launch: Launch, codes: Vec<u8>) -> Scaled {
        let scales: Vec<_> = (0..launch.tokens).map(|t| 2f32.powi((t % 5) as i32 - 2)).collect();
        let scale = |i: usize| scales[i / launch.hidden as usize];
        let element = if launch.variant == I8 { |code| f32::from(code as i8) } else { e4m3 };
        launch.weight = codes.iter().enumerate().map(|(i, code)| element(*code) * scale(i)).collect();
        Scaled { launch, codes, scales }
    }

    /// Creates rows of every kind. Elements in fp8 are at most 1.875. In a launch with an odd `at` and more than 14
    /// rows, a hidden state is NaN, so the kernel multiplies in bf16.
    fn of_shape(at: u32, shape: [u32; 6], dtype: u32) -> Scaled {
        let mut launch = Launch::new(at, shape, dtype);
        if at.is_multiple_of(2) {
            launch.states.iter_mut().for_each(|x| *x = if x.is_nan() { 1.0 } else { *x * 2f32.powi(at as i32 % 7) });
        }
        let code = |i: usize| input(at * 1_000_003 + i as u32) as u8 & if dtype == I8 { 0xff } else { 0xbf };
        let mut codes: Vec<_> = (0..launch.weight.len()).map(code).collect();
        if at % 5 == 4 && dtype == F8_E4M3 {
            let last = codes.len() - 1;
            codes[last - last / 3] = if at.is_multiple_of(2) { 0x7f } else { 0xff };
        }
        Scaled::new(launch, codes)
    }

    /// Creates 128 rows, for the codes from `first_code` on. The mask of a row allows only the token of its code. The
    /// logit of a token is the value of its code, scaled.
    fn of_all_codes(first_code: u32, dtype: u32) -> Scaled {
        let mut launch = Launch::new(0, [128, 128, 256, 0, 16, 2], dtype);
        launch.states.fill(1.0);
        for (r, row) in (first_code..).zip(&mut launch.rows) {
            (row.greedy, row.inv_temperature, row.bias) = (true, 1.0, Vec::new());
            row.mask = (0..8).map(|word| if word == r / 32 { 1 << (r % 32) } else { 0 }).collect();
        }
        let mut codes = vec![0; 256 * 16];
        for code in (0..=255u8).filter(|code| dtype == I8 || code & 0x7f != 0x7f) {
            let token = usize::from(code);
            codes[token * 16 + token % 16] = code;
        }
        Scaled::new(launch, codes)
    }

    /// Creates a greedy row with two elements: the first one multiplies only zeros, so the logits depend on the second.
    fn of_two_elements(elements: [f32; 2], dtype: u32) -> Scaled {
        let mut launch = Launch::new(648, [8, 1, 300, 0, 32, 1], dtype);
        launch.states.fill(0.0);
        launch.states[5..7].copy_from_slice(&elements);
        (launch.rows[0].greedy, launch.rows[0].inv_temperature) = (true, 1.0);
        let code = |i: usize| if i % 32 == 5 { 0 } else { input(i as u32) as u8 & 0x3f };
        Scaled::new(launch, (0..300 * 32).map(code).collect())
    }

    fn write(&self, scale: impl Fn(f32) -> f32, out: &mut Input) {
        self.launch.write(1.0, out);
        out.put_all(self.codes.iter().copied());
        out.put_all(self.scales.iter().map(|x| scale(*x)));
    }
}

/// The number of draws that differ from the reference's, with these scales.
fn wrong_draws(program: &Path, launches: &[Scaled], scale: impl Fn(f32) -> f32 + Copy) -> usize {
    let mut input = Input::default();
    input.put(launches.len() as u32);
    launches.iter().for_each(|scaled| scaled.write(scale, &mut input));
    let mut found = emulated::answer(program, input);
    let rows = launches.iter().flat_map(|scaled| (0..scaled.launch.rows.len()).map(move |r| scaled.launch.expected(r)));
    let wrong = rows.filter(|want| is_wrong(found.take(), *want)).count();
    assert!(found.is_empty());
    wrong
}

#[test]
fn a_scaled_weight_has_the_draws_of_the_same_weight_in_float32() {
    let Some(program) = &*PROGRAM else { return };
    let shapes = [
        // Columns, rows, tokens, first token, hidden, blocks.
        [8, 1, 700, 0, 64, 2],
        [8, 3, 700, 37, 80, 1],
        [8, 8, 2000, 16, 256, 3],
        [32, 20, 2100, 32, 144, 4],
        [32, 32, 15, 3, 16, 1],
        [32, 27, 900, 5, 1040, 2],
        [64, 50, 300, 3, 528, 1],
        [128, 70, 600, 21, 400, 2],
        [128, 128, 330, 0, 48, 2],
        [8, 8, 300, 64, 2064, 2],
        // No multiples of 16 columns.
        [8, 3, 300, 5, 9, 1],
        [32, 20, 200, 0, 1001, 2],
    ];
    let mut launches = Vec::new();
    for dtype in [F8_E4M3, I8] {
        launches.extend((600..).zip(shapes).map(|(at, shape)| Scaled::of_shape(at, shape, dtype)));
        launches.extend([0, 128].map(|first| Scaled::of_all_codes(first, dtype)));
        // Exact in f16, then on both sides of the limits, then inexact.
        let powers = [
            [0, -3],
            [0, -29],
            [0, -30],
            [-60, -60],
            [-61, -61],
            [79, 60],
            [80, 60],
            [0, -32],
            [0, -40],
            [0, -45],
            [-61, -99],
        ];
        launches.extend(powers.map(|powers| Scaled::of_two_elements(powers.map(|power| 2f32.powi(power)), dtype)));
    }
    assert_eq!(wrong_draws(program, &launches, |scale| scale), 0);
    // The negative controls: wrong scales, and one wrong code in each launch.
    assert!(wrong_draws(program, &launches, |scale| scale * 1.5) > 50);
    for scaled in &mut launches {
        let last = scaled.codes.len() - 1;
        scaled.codes[last / 2] ^= 0x40;
    }
    assert!(wrong_draws(program, &launches, |scale| scale) > 0);
}
