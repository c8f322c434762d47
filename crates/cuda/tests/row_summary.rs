//! Runs the summaries of stored rows on the processor. The system's C++ compiler builds the kernel with a small
//! emulator of a block's threads. The test compares every mass, the bits of the sum of masses, the largest logits and
//! the stored logits with core's.

use crate::emulated::{self, Input};
use crate::inputs;
use flash_sampling_core::backend::{Candidate, MassHistogram, Winner, by_logit_rank};
use flash_sampling_core::{Domain, Noise};

/// A case: first token, number of tokens, length of the list, and kind of logits.
#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "printed where a case fails")]
struct Case {
    first: u32,
    tokens: u32,
    limit: u32,
    is_raw: bool,
    has_mask: bool,
    kind: u32,
}

#[test]
fn a_pass_over_a_row_finds_its_masses_their_sum_and_the_largest_logits() {
    let Some(program) = emulated::program("row_summary") else { return };
    let noise = Noise::new(5, 3).unwrap();
    let normal = |i: u32| inputs::normal(|i| noise.word(Domain::Generator, 1, i), i);
    let shapes = [(0, 8192), (5, 1), (4097, 20_000), (64, 8193), (3, 300)];
    let (mut lost, mut wrong_order, mut wrong_rounding) = (0, 0, 0);
    for (case, (first, tokens)) in (0u32..).zip(shapes.into_iter().cycle().take(70)) {
        let (limit, is_raw, kind) = ([20, 0, 128, 1][case as usize % 4], case % 3 != 0, case / 5);
        let case = Case { first, tokens, limit, is_raw, has_mask: is_raw && case % 2 == 0, kind };
        let logit = |t: u32| match case.kind {
            0 => 2.0 * normal(t),
            1 => (2.0 * normal(t)).round() / 2.0,
            2 if t.is_multiple_of(3) => f32::NEG_INFINITY,
            // Beyond the window of masses, and beyond the grid: more tokens than the list has room for.
            3 => 200.0 * normal(t),
            4 => 4e6 * normal(t),
            5 => f32::NEG_INFINITY,
            // The same with equal logits.
            6 => 1.5,
            // A row whose first part is below the window of the second.
            7 if t < 9000 => normal(t) - 90.0,
            // One token has almost all mass.
            8 if t == 3 => 30.0,
            9 => 1e-3 * normal(t),
            10 => 1e-40 * normal(t),
            // Below and above the sizes that the fast path supports.
            11 => normal(t) - 130_000.0,
            12 => normal(t) + 131_072.0,
            13 => 3e5 + 2.0 * normal(t),
            _ => 2.0 * normal(t),
        };
        let raw: Vec<f32> = (0..tokens).map(logit).collect();
        let words_of_mask = if case.has_mask { (first + tokens).div_ceil(32) } else { 0 };
        let mask: Vec<u32> = (0..words_of_mask).map(|w| w.wrapping_mul(0x9e37_79b9) | 1).collect();
        let inv_temperature = if case.is_raw { 1.25f32 } else { 1.0 };
        let transformed = |(t, &raw): (usize, &f32)| {
            let token = first as usize + t;
            let is_allowed = !case.has_mask || mask[token / 32] >> (token % 32) & 1 == 1;
            if is_allowed { raw * inv_temperature } else { f32::NEG_INFINITY }
        };
        let logits: Vec<f32> = raw.iter().enumerate().map(transformed).collect();

        let mut input = Input::default();
        input.put([first, tokens, case.limit, case.is_raw.into(), inv_temperature.to_bits(), words_of_mask]);
        input.put_all(mask.iter().copied());
        input.put_all(raw.iter().copied());
        input.put_all(MassHistogram::weights().iter().copied());
        let mut output = emulated::answer(&program, input);

        let mut mass = MassHistogram::default();
        logits.iter().for_each(|&logit| mass.push(logit));
        let mut expected = Vec::new();
        mass.to_words(&mut expected);
        let found: Vec<u64> = output.list(MassHistogram::WORDS);
        assert!(found == expected, "{case:?}");
        assert_eq!(output.take::<u64>(), u64::MAX, "{case:?}");

        let log_mass = mass.log_mass();
        let sum: f64 = output.take();
        // Some compilers' empty sum is -0.
        assert_eq!((sum + 0.0).to_bits(), (log_mass.sum + 0.0).to_bits(), "{case:?}");
        assert_eq!(output.take::<f32>().to_bits(), log_mass.max.to_bits(), "{case:?}");

        let listed: u32 = output.take();
        let is_lost = listed == u32::MAX;
        let candidate = |_| {
            let winner = Winner::from_ordered_bits(output.take());
            Candidate { winner, logit: output.take() }
        };
        let kept: Vec<Candidate> = (0..if is_lost { 0 } else { listed }).map(candidate).collect();
        assert!(kept.is_sorted_by(|a, b| by_logit_rank(a, b).is_lt()), "{case:?}");
        let finite = (first..).zip(&logits).filter(|(_, logit)| logit.is_finite());
        let mut best: Vec<_> = finite.map(|(token, &logit)| (logit, token)).collect();
        best.sort_by(|a, b| (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1)));
        best.truncate(case.limit as usize);
        // More tokens than the list has room for.
        let may_be_lost = matches!(case.kind, 3 | 4 | 6 | 9 | 10) && tokens > 512;
        assert!(!is_lost || may_be_lost, "{case:?}");
        lost += u32::from(is_lost);
        if !is_lost {
            let found: Vec<_> = kept.iter().map(|c| (c.logit, c.winner.token)).collect();
            assert_eq!(found, best, "{case:?}");
        }
        let [upwards, fused]: [f64; 2] = output.take();
        wrong_order += u32::from(upwards.to_bits() != sum.to_bits());
        wrong_rounding += u32::from(fused.to_bits() != sum.to_bits());
        for (t, logit) in logits.iter().enumerate() {
            assert_eq!(output.take::<f32>().to_bits(), logit.to_bits(), "{case:?}, token {t}");
        }
        assert!(output.is_empty());
    }
    assert!(lost > 0, "no list is lost");
    assert!(
        wrong_order > 0 && wrong_rounding > 0,
        "no case distinguishes the sum from {wrong_order} and {wrong_rounding} others"
    );
}
