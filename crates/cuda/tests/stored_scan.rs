//! Runs the scans of stored logits on the processor. The system's C++ compiler builds the kernels with a small emulator
//! of a block's threads, and the test compares every result with the core's plain scan.

use crate::emulated::{self, Input, Output};
use crate::inputs;
use flash_sampling_core::backend::selection::PrefixMass;
use flash_sampling_core::backend::{Candidate, Frontier, LogitRank, Moments, Request, RowSummary, Winner};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Domain, Head, Matrix, Noise, Order, PerturbedArgmax, Plan, RowParams};
use std::path::Path;

/// Takes a list of tokens from the output.
fn kept(found: &mut Output) -> Vec<Candidate> {
    let count: u64 = found.take();
    let candidate = |_| {
        let winner = Winner::from_ordered_bits(found.take());
        Candidate { winner, logit: found.take() }
    };
    (0..count).map(candidate).collect()
}

/// Returns a number times a power of two, as its low 128 bits and its high bits.
fn shifted(number: u64, by: u32) -> [u128; 2] {
    let high = if by > 64 { number >> (128 - by) } else { 0 };
    [u128::from(number) << by, high.into()]
}

fn scan(
    program: &Path,
    params: &RowParams<'_>,
    first: u32,
    floor: f32,
    doubts: &[PrefixMass],
    logits: &[f32],
) -> Output {
    let mut input = Input::default();
    input.put([first, logits.len() as u32]);
    input.put([params.seed, params.position]);
    input.put(params.first_draw);
    // The order is llama.cpp's: the temperature comes last.
    input.put([1.0 / params.temperature, floor]);
    input.put(doubts.len() as u32);
    input.put_all(doubts.iter().map(|doubt| [doubt.rank.token, doubt.rank.logit.to_bits()]));
    input.put(Moments::of_temperature(1.0).scale());
    input.put_all(logits.iter().copied());
    emulated::answer(program, input)
}

#[test]
fn the_kernels_of_scans_find_what_the_plain_scan_finds() {
    let Some(program) = emulated::program("stored_scan") else { return };
    let noise = Noise::new(9, 4).unwrap();
    let normal = |i: u32| inputs::normal(|i| noise.word(Domain::Generator, 1, i), i);
    let shapes = [(0, 8192), (3, 1), (4095, 2), (127, 4100), (4096, 4096), (5001, 6203), (77, 9000)];
    let (mut max_points, mut carried) = (0, 0);
    for (case, (first, tokens)) in (0u32..).zip(shapes.into_iter().cycle().take(28)) {
        let temperature = [1.0, 0.4, 1e-37, 30.0][(case / 7) as usize];
        let seed = 9 + u64::from(case % 3 == 0);
        let params = RowParams {
            seed,
            position: 4,
            first_draw: 2,
            temperature,
            top_p: 0.9,
            top_n_sigma: 1.0,
            order: Order::LlamaCpp,
            ..RowParams::default()
        };
        // Falls as the noise rises, at half the rate: every token is on the frontier.
        let descending = |t| -0.5 * Noise::new(seed, 4).unwrap().gumbel(Domain::Token, 2, t);
        let logit = |t: u32| match case % 5 {
            _ if case % 7 == 6 && temperature == 1.0 => descending(t),
            0 => 0.0 * normal(t),
            1 => (2.0 * normal(t)).round() / 2.0,
            2 if t.is_multiple_of(3) => f32::NEG_INFINITY,
            3 => 200.0 * normal(t),
            // Nearly equal logits, and logits so large that sums of squares exceed 128 bits.
            4 if temperature != 1.0 => 64.0 + 2f32.powi(-16) * normal(t).round(),
            4 => 1e9 * normal(t),
            _ => 2.0 * normal(t),
        };
        let logits: Vec<f32> = (first..first + tokens).map(logit).collect();
        let place = |t: u32| LogitRank { logit: logits[(t % tokens) as usize], token: first + t % tokens };
        let places = [place(0), place(17), place(99), LogitRank { logit: 0.5, token: first }];
        let doubts: Vec<_> = places.into_iter().filter(|place| place.logit.is_finite()).map(PrefixMass::new).collect();
        let floor = [f32::NEG_INFINITY, 1.0, 1e9][(case % 3) as usize];

        let weight = vec![0.0f32; (first + tokens) as usize];
        let head = Head::new(Matrix::new(&weight, weight.len(), 1).unwrap()).unwrap();
        let can = Reference::new(head, Plan::default(), ReferenceVariant::Tiled).capabilities();
        let row = params.check(&[], &can, &Plan::default(), first + tokens).unwrap();
        let summary = |request| {
            let mut summary = RowSummary::default();
            summary.of(&row, request, first, &logits);
            summary
        };
        let mut found = scan(&program, &params, first, floor, &doubts, &logits);
        let overview = summary(Request::Overview);
        let (points, mut frontier) = (kept(&mut found), Frontier::default());
        points.iter().for_each(|&point| frontier.push(point));
        assert_eq!(&frontier, &overview.frontiers()[0], "case {case}");
        // Only a few more than the frontiers of parts of 4096 tokens have.
        assert!(points.len() <= frontier.len() + 60, "{} for {} points, case {case}", points.len(), frontier.len());
        max_points = max_points.max(frontier.len());
        let mut above = kept(&mut found);
        above.sort_by(flash_sampling_core::backend::by_logit_rank);
        assert_eq!(above, summary(Request::List { floor }).list, "case {case}");
        for before in summary(Request::PrefixMass { points: &doubts, below: f32::NEG_INFINITY }).prefix_masses {
            assert_eq!(found.take::<u64>(), before.mass(), "case {case}, {:?}", before.rank);
        }
        for rank in doubts.iter().map(|doubt| doubt.rank) {
            assert_eq!(found.take::<u64>(), u64::from(rank.count_before(first, &logits)), "case {case}, {rank:?}");
        }
        // With |x| = 2^40 a + 2^20 b + c, the products of pairs of a, b and c.
        let [count, high, low, products @ ..]: [u64; 9] = found.take();
        let squares = products.into_iter().zip([80, 61, 41, 40, 21, 0]).map(|(sum, by)| shifted(sum, by));
        let [low_squares, carries] = squares.fold([0u128; 2], |sum, square| {
            let (low, came_around) = sum[0].overflowing_add(square[0]);
            [low, sum[1] + square[1] + u128::from(came_around)]
        });
        let sum = (i128::from(high.cast_signed()) << 30) + i128::from(low);
        let words = [sum.cast_unsigned(), low_squares].map(|wide| [wide as u64, (wide >> 64) as u64]);
        let words = [count, words[0][0], words[0][1], words[1][0], words[1][1], carries as u64];
        assert_eq!(words, overview.moments.to_words(), "case {case}");
        carried += carries;
        assert!(found.is_empty());
    }
    assert!(max_points > 8000, "no frontier of all tokens: {max_points}");
    assert!(carried > 0, "no sum of squares beyond 128 bits");
}
