//! Draws with filters from a shadow of the weight, and their negative controls.

use super::shadow::{Control, SHAPES, answers, bf16};
use super::{Launch, PROGRAM, input};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Head, Matrix, PerturbedArgmax, Plan, RowError, RowParams, Samples, ShadowBuffer};

const SHADOW_LISTS: u32 = 4;
/// Statuses of draws.
const DRAWN: u32 = 0;
const UNDECIDED: u32 = 6;
/// A min-p that keeps a token of [`along_a_residual`] if its bound is right.
const MIN_P: f32 = 0.84;

impl Launch {
    /// Gives every second row filters, whose first is a min-p or a top-k.
    fn with_filters(mut self) -> Launch {
        self.variant = SHADOW_LISTS;
        for (r, row) in self.rows.iter_mut().enumerate().filter(|(r, row)| r % 2 == 0 && !row.greedy) {
            let ln = |p: f32| f64::from(p).ln();
            (row.ln_min_p, row.top_k, row.top_p) = match r / 2 % 6 {
                0 => (ln(0.05), 0, 1.0),
                1 => (f64::NEG_INFINITY, 20, 1.0),
                2 => (f64::NEG_INFINITY, 50, 0.9),
                3 => (ln(0.02), 5, 1.0),
                4 => (ln(0.3), 0, 0.7),
                _ => (ln(1e-4), 9, 0.95),
            };
        }
        self
    }

    /// The draw of the reference, with filters: token, score, logit and status.
    fn filtered(&self, r: usize) -> [u32; 4] {
        let row = &self.rows[r];
        let min_p = [0.05, 0.02, 0.3, 1e-4, MIN_P].into_iter().find(|p| f64::from(*p).ln() == row.ln_min_p);
        let logits = match self.logits(r) {
            Ok(logits) if row.top_k > 0 || min_p.is_some() => logits,
            _ => return self.expected(r),
        };
        let matrix = Matrix::new(&logits, logits.len(), 1).unwrap();
        let head = Head::shard(matrix, self.first as usize, (self.first + self.tokens) as usize).unwrap();
        let (top_k, top_p, min_p) = (row.top_k, row.top_p, min_p.unwrap_or(0.0));
        let (seed, position, first_draw) = (row.seed, row.seed + 3, row.draw);
        let params = RowParams { seed, position, first_draw, top_k, top_p, min_p, ..RowParams::default() };
        let mut out = Samples::new();
        let mut reference = Reference::new(head, Plan::default(), ReferenceVariant::Tiled);
        reference.sample(Matrix::new(&[1.0f32], 1, 1).unwrap(), &[params], &mut out).unwrap();
        match out.row(0) {
            Ok(row) => [row.draws[0].token, row.draws[0].score.to_bits(), row.draws[0].logit.to_bits(), DRAWN],
            Err(RowError::NoFiniteLogit) => [u32::MAX, f32::NEG_INFINITY.to_bits(), f32::NEG_INFINITY.to_bits(), 1],
            Err(error) => panic!("{error}"),
        }
    }
}

/// A weight with a few tokens far above the others for each hidden state, as in language models.
fn peaked(at: u32, shape: [u32; 6]) -> Launch {
    let mut launch = Launch::real(at, shape, 1.0);
    let (hidden, tokens) = (launch.hidden as usize, launch.tokens as usize);
    for r in 0..launch.rows.len() {
        launch.rows[r].inv_temperature = [1.0, 0.7, 2.0][r % 3];
        for (i, share) in [0.9f32, 0.8, 0.7, 0.65, 0.5].into_iter().enumerate() {
            let token = (r * 131 + i * 977 + 40) % tokens;
            let state: Vec<f32> = launch.states[r * hidden..][..hidden].to_vec();
            let norm = state.iter().map(|h| h * h).sum::<f32>();
            if norm.is_nan() {
                continue;
            }
            let factor = 14.0 * share / norm;
            let row = &mut launch.weight[token * hidden..][..hidden];
            row.iter_mut().zip(state).for_each(|(w, h)| *w = bf16(*w * 0.2 + factor * h));
        }
    }
    launch
}

/// A hidden state is the residual of token 100, so the logit of this token is nearly its upper bound, 1 above the logit
/// of its copy. Other tokens have exact copies. Token 200 is above token 100, and token 210 is between its logit and 0.9
/// of the bound.
fn along_a_residual(ln_min_p: f64, top_k: u32) -> Launch {
    const HIDDEN: usize = 64;
    for salt in 0.. {
        let real = |k: u32| bf16(input(k + 1000 * salt) as f32 * 2f32.powi(-31) - 1.0);
        let token: Vec<f32> = (0..HIDDEN as u32).map(real).collect();
        let buffer = ShadowBuffer::new(&Matrix::new(&token, 1, HIDDEN).unwrap()).unwrap();
        let shadow = buffer.shadow();
        let copy = |k: usize| shadow.scales()[0] * f32::from(shadow.codes()[k]);
        let state: Vec<f32> = (0..HIDDEN).map(|k| bf16((token[k] - copy(k)) * 64.0)).collect();
        let dot = |of: &dyn Fn(usize) -> f32| (0..HIDDEN).map(|k| f64::from(of(k)) * f64::from(state[k])).sum::<f64>();
        let (exact, approximate) = (dot(&|k| token[k]), dot(&copy));
        let bound = exact - approximate;
        // Large logits of the other tokens would not have the precision.
        if approximate.abs() > 5.0 * bound {
            continue;
        }
        let mut weight = vec![0.0; 300 * HIDDEN];
        weight[100 * HIDDEN..101 * HIDDEN].copy_from_slice(&token);
        let k = (0..HIDDEN).max_by(|&a, &b| state[a].abs().total_cmp(&state[b].abs())).unwrap();
        for (token, above) in [(200, 0.13), (210, -0.05)] {
            weight[token * HIDDEN + k] = bf16(((exact + above * bound) / f64::from(state[k])) as f32);
        }
        let states: Vec<f32> = state.iter().copied().cycle().take(8 * HIDDEN).collect();
        let mut launch = Launch::new(0, [8, 8, 300, 0, HIDDEN as u32, 2], SHADOW_LISTS);
        (launch.weight, launch.states) = (weight, states);
        for row in &mut launch.rows {
            let inv_temperature = 1.0 / bound as f32;
            (row.greedy, row.inv_temperature, row.mask, row.bias) = (false, inv_temperature, Vec::new(), Vec::new());
            (row.ln_min_p, row.top_k) = (ln_min_p, top_k);
        }
        return launch;
    }
    unreachable!("a few rows are enough")
}

fn launches() -> Vec<Launch> {
    let integers = (0..).zip(SHAPES).map(|(at, shape)| Launch::new(at + 600, shape, SHADOW_LISTS));
    let real = (0..).zip(SHAPES).map(|(at, shape)| Launch::real(at + 700, shape, [0.5, 2.0, 4.0][at as usize % 3]));
    let peaks = (0..).zip(SHAPES).map(|(at, shape)| peaked(at + 800, shape));
    // Enough tokens and blocks that top-k has a cutoff.
    let cut = (0..2).map(|at| peaked(820 + at, [16, 12, 5000, 48 + at, 136, 16]));
    // All logits are equal, so that no list holds them.
    let mut equal = Launch::real(830, [8, 4, 9000, 0, 64, 3], 1.0);
    equal.weight.fill(0.0);
    let mut launches: Vec<_> = integers.chain(real).chain(peaks).chain(cut).filter(|l| l.soft_cap == 0.0).collect();
    launches.push(equal);
    let mut launches: Vec<_> = launches.into_iter().map(Launch::with_filters).collect();
    launches.extend([along_a_residual(f64::from(MIN_P).ln(), 0), along_a_residual(f64::NEG_INFINITY, 2)]);
    launches
}

#[test]
fn a_draw_with_filters_from_a_shadow_is_the_draw_from_the_weight() {
    let Some(program) = &*PROGRAM else { return };
    let launches = launches();
    let draws = |launches: &[Launch], control| {
        let mut found = answers(program, launches, control);
        let mut wrong = Vec::new();
        let (mut decided, mut undecided, mut short) = (0, 0, 0);
        for (at, launch) in launches.iter().enumerate() {
            for r in 0..launch.rows.len() {
                let (draw, count, want) = (found.take::<[u32; 4]>(), found.take::<u32>(), launch.filtered(r));
                if draw[3] == UNDECIDED {
                    undecided += 1;
                    continue;
                }
                decided += 1;
                short += u32::from(count > 0 && count < launch.tokens / 2);
                if draw != want {
                    wrong.push((at, r, draw, want));
                }
            }
        }
        assert!(found.is_empty());
        (wrong, decided, undecided, short)
    };
    let (wrong, decided, undecided, short) = draws(&launches, Control::None);
    assert!(wrong.is_empty(), "{} wrong draws: {:x?}", wrong.len(), &wrong[..wrong.len().min(5)]);
    let seen = format!("{decided} rows are decided, {undecided} are not; {short} short lists");
    println!("{seen}");
    assert!(undecided > 10 && 4 * undecided < decided && short > 40, "{seen}");
    // No list holds the equal logits of the two rows with filters.
    let equal = &launches[launches.len() - 3..launches.len() - 2];
    assert_eq!(draws(equal, Control::None).2, 2);
    let mut flat = Launch::real(840, [8, 8, 2000, 0, 200, 3], 0.5).with_filters();
    for row in &mut flat.rows {
        (row.greedy, row.inv_temperature, row.mask, row.bias) = (false, 4.0, Vec::new(), Vec::new());
        (row.ln_min_p, row.top_k, row.top_p) = (f64::NEG_INFINITY, 20, 1.0);
    }
    let flat = core::slice::from_ref(&flat);
    let residual = &launches[launches.len() - 2..launches.len() - 1];
    for (control, launches) in
        [(Control::SmallErrors, residual), (Control::EstimatesAsBounds, residual), (Control::CutByBounds, flat)]
    {
        assert!(draws(launches, Control::None).0.is_empty());
        let found = draws(launches, control);
        assert!(!found.0.is_empty(), "{control:?} was not detected: {} decided, {} undecided", found.1, found.2);
    }
}
