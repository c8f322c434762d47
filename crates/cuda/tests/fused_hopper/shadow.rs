//! Draws from a shadow of the weight, and their negative controls.

use super::{Launch, PROGRAM, input, is_wrong};
use crate::emulated::{self, Input, Output};
use flash_sampling_core::backend::code_stride;
use flash_sampling_core::{Matrix, ShadowBuffer};
use std::path::Path;

const SHADOW: u32 = 3;
const PORTABLE_SHADOW: u32 = 5;

/// The negative controls of the draw from a shadow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Control {
    None,
    /// Norms of residuals that are rounded to 90%.
    SmallErrors,
    /// Digits without the lower one, and bounds of both.
    OneDigit,
    /// Lists that drop candidates without room.
    DroppedCandidates,
    /// Estimates of logits in place of their upper bounds, in the lists of rows with filters.
    EstimatesAsBounds,
    /// Upper bounds in place of estimates, and no record of the cutoff.
    CutByBounds,
}

/// Rounds to bf16, towards zero.
pub(crate) fn bf16(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0xffff_0000)
}

impl Launch {
    /// Creates rows with real inputs, whose dot products are sums in the order of the emulated products.
    pub(crate) fn real(at: u32, shape: [u32; 6], spread: f32) -> Launch {
        let mut launch = Launch::new(at, shape, SHADOW);
        let real = |i: usize| bf16((input(at * 1_000_003 + i as u32) as f32 * 2f32.powi(-31) - 1.0).powi(3) * spread);
        launch.weight.iter_mut().enumerate().for_each(|(i, w)| *w = real(i));
        launch.states.iter_mut().enumerate().filter(|(_, h)| !h.is_nan()).for_each(|(i, h)| *h = real(i + (1 << 27)));
        launch
    }

    /// Creates a greedy row for each hidden state.
    fn greedy([columns, hidden, blocks]: [u32; 3], weight: Vec<f32>, states: Vec<f32>) -> Launch {
        let (rows, tokens) = (states.len() as u32 / hidden, weight.len() as u32 / hidden);
        let mut launch = Launch::new(0, [columns, rows, tokens, 0, hidden, blocks], SHADOW);
        (launch.weight, launch.states) = (weight, states);
        for row in &mut launch.rows {
            (row.greedy, row.inv_temperature, row.mask, row.bias) = (true, 1.0, Vec::new(), Vec::new());
        }
        launch
    }

    /// Writes the shadow of the weight, with the given changes.
    pub(crate) fn write_shadow(&self, control: Control, out: &mut Input) {
        let hidden = self.hidden as usize;
        let buffer = ShadowBuffer::new(&Matrix::new(&self.weight, self.tokens as usize, hidden).unwrap()).unwrap();
        let shadow = buffer.shadow();
        let error = |e: f32| if control == Control::SmallErrors { e * 0.9 } else { e };
        let largest = shadow.errors().iter().zip(shadow.norms()).map(|(e, n)| e + n).fold(0.0, f32::max);
        let flags = [Control::OneDigit, Control::DroppedCandidates, Control::EstimatesAsBounds, Control::CutByBounds];
        let flag = flags.iter().position(|flag| *flag == control).map_or(0, |at| 1 << at);
        out.put([flag, code_stride(hidden) as u32, largest.to_bits()]);
        out.put_all(shadow.codes().iter().map(|code| *code as u8));
        out.put_all(shadow.scales().iter().copied());
        out.put_all(shadow.errors().iter().map(|e| error(*e)));
        out.put_all(shadow.norms().iter().copied());
    }
}

/// Columns, rows, tokens, first token, hidden, blocks.
pub(crate) const SHAPES: [[u32; 6]; 11] = [
    [8, 1, 700, 0, 64, 2],
    [8, 3, 700, 37, 72, 1],
    [8, 8, 2000, 16, 200, 3],
    [8, 2, 300, 0, 1160, 2],
    [16, 16, 333, 47, 8, 2],
    [32, 20, 2100, 32, 136, 4],
    [32, 32, 1, 3, 64, 1],
    [96, 40, 900, 0, 304, 3],
    [96, 90, 600, 21, 40, 2],
    [8, 3, 60, 0, 4096, 1],
    [8, 2, 50, 0, 2304, 1],
];

/// Launches whose rows a shadow decides or leaves open.
fn shadow_launches() -> Vec<Launch> {
    let integers = (0..).zip(SHAPES).map(|(at, shape)| Launch::new(at + 300, shape, SHADOW));
    let real = (0..).zip(SHAPES).map(|(at, shape)| Launch::real(at + 400, shape, [0.5, 2.0, 4.0][at as usize % 3]));
    let mut launches: Vec<_> = integers.chain(real).filter(|launch| launch.soft_cap == 0.0).collect();
    // Huge and tiny weights, and a weight that is not finite.
    for (at, spread) in [1e36, 1e-36, 1e-41].into_iter().enumerate() {
        launches.push(Launch::real(500 + at as u32, [8, 6, 400, 0, 64, 2], spread));
    }
    let mut infinite = Launch::real(510, [8, 6, 400, 0, 64, 2], 1.0);
    infinite.weight[200 * 64 + 9] = f32::INFINITY;
    launches.push(infinite);
    launches.extend([along_a_residual(), with_small_digits(), with_a_large_column()]);
    launches
}

/// A row's hidden state is the residual of token 100, whose logit is above that of token 200. The shadow's logit of
/// token 100 is lower by nearly its whole bound, and that of token 200 is exact.
fn along_a_residual() -> Launch {
    const HIDDEN: usize = 64;
    let mut weight = vec![0.0; 300 * HIDDEN];
    let row = |salt: u32| (0..HIDDEN as u32).map(move |k| bf16(input(k + salt) as f32 * 2f32.powi(-31) - 1.0));
    for salt in 0.. {
        let token: Vec<f32> = row(1000 * salt).collect();
        let buffer = ShadowBuffer::new(&Matrix::new(&token, 1, HIDDEN).unwrap()).unwrap();
        let shadow = buffer.shadow();
        let copy = |k: usize| shadow.scales()[0] * f32::from(shadow.codes()[k]);
        let state: Vec<f32> = (0..HIDDEN).map(|k| bf16((token[k] - copy(k)) * 64.0)).collect();
        let dot = |of: &dyn Fn(usize) -> f32| (0..HIDDEN).map(|k| f64::from(of(k)) * f64::from(state[k])).sum::<f64>();
        let (exact, approximate) = (dot(&|k| token[k]), dot(&copy));
        let other = approximate + 0.97 * (exact - approximate);
        let place = (0..HIDDEN).find_map(|k| {
            let factor = bf16((other / f64::from(state[k])) as f32);
            let share = (f64::from(factor) * f64::from(state[k]) - approximate) / (exact - approximate);
            // A large factor would have a large bound.
            (share > 0.95 && share < 0.99 && factor.abs() < 10.0).then_some((k, factor))
        });
        let Some((k, factor)) = place.filter(|_| other > 0.0) else { continue };
        weight[100 * HIDDEN..101 * HIDDEN].copy_from_slice(&token);
        weight[200 * HIDDEN + k] = factor;
        return Launch::greedy([8, HIDDEN as u32, 2], weight, state);
    }
    unreachable!("a few rows are enough")
}

/// The elements of a hidden state that give token 100 the largest logit have no high digit.
fn with_small_digits() -> Launch {
    const HIDDEN: usize = 64;
    let mut weight = vec![0.0; 300 * HIDDEN];
    (1..HIDDEN).for_each(|k| weight[100 * HIDDEN + k] = 1.0);
    weight[200 * HIDDEN] = 0.1875;
    let mut state = vec![1.0 / 256.0; HIDDEN];
    state[0] = 1.0;
    Launch::greedy([8, HIDDEN as u32, 2], weight, state)
}

/// A column of the weight is so large that all other codes are zero. The hidden states have zeros there, so every token
/// is a candidate.
fn with_a_large_column() -> Launch {
    let mut launch = Launch::real(520, [8, 8, 24_000, 0, 64, 3], 1.0);
    for row in &mut launch.rows {
        (row.mask, row.bias) = (Vec::new(), Vec::new());
    }
    launch.weight.chunks_mut(64).for_each(|token| token[0] = 1024.0);
    launch.states.chunks_mut(64).for_each(|state| state[0] = 0.0);
    launch
}

/// The output of the program for launches with a shadow.
pub(super) fn answers(program: &Path, launches: &[Launch], control: Control) -> Output {
    let mut input = Input::default();
    input.put(launches.len() as u32);
    for launch in launches {
        launch.write(1.0, &mut input);
        launch.write_shadow(control, &mut input);
    }
    emulated::answer(program, input)
}

#[test]
fn a_draw_from_a_shadow_is_the_draw_from_the_weight() {
    let Some(program) = &*PROGRAM else { return };
    check_draws(program, &shadow_launches());
}

#[test]
fn the_portable_kernel_draws_from_a_shadow_what_it_draws_from_the_weight() {
    let Some(program) = &*PROGRAM else { return };
    let mut launches = shadow_launches();
    for launch in &mut launches {
        launch.variant = PORTABLE_SHADOW;
        launch.columns = launch.columns.min(64);
        launch.rows.truncate(64);
        launch.states.truncate(64 * launch.hidden as usize);
    }
    check_draws(program, &launches);
}

/// Compares draws with the reference, and checks that the negative controls change draws of the last three launches.
fn check_draws(program: &Path, launches: &[Launch]) {
    let wrong_draws = |launches: &[Launch], control| {
        let mut found = answers(program, launches, control);
        let (mut wrong, mut rows, mut open) = (Vec::new(), 0, 0);
        for (at, launch) in launches.iter().enumerate() {
            (rows, open) = (rows + launch.rows.len() as u32, open + found.take::<u32>());
            for r in 0..launch.rows.len() {
                let (draw, want) = (found.take(), launch.expected(r));
                if is_wrong(draw, want) {
                    wrong.push((at, r, draw, want));
                }
            }
        }
        assert!(found.is_empty());
        (wrong, rows, open)
    };
    let (wrong, rows, open) = wrong_draws(launches, Control::None);
    assert!(wrong.is_empty(), "{} wrong draws: {:x?}", wrong.len(), &wrong[..wrong.len().min(5)]);
    // Both ways are taken: most rows are decided, and some are left open.
    println!("{open} of {rows} rows were left open");
    assert!(open > 10 && 4 * open < rows, "{open} of {rows} rows were left open");
    for control in [Control::SmallErrors, Control::OneDigit, Control::DroppedCandidates] {
        let last = &launches[launches.len() - 3..];
        assert!(!wrong_draws(last, control).0.is_empty(), "{control:?} was not detected");
    }
}
