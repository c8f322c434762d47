//! Speculative decoding by rejection: emitted tokens follow the target's law, unless noise is used twice.
//!
//! Target and draft are Markov chains over six tokens, with blocks of three draft tokens. A chi-square with pooled tail
//! compares the first four emitted tokens of many sequences with the target's law of four tokens.

use flash_sampling_conformance::Effort;
use flash_sampling_conformance::logits::softmax;
use flash_sampling_conformance::report::ALPHA;
use flash_sampling_conformance::statistics::Bins;
use flash_sampling_conformance::suite::effort;
use flash_sampling_core::speculation::{DraftLaw, Judgement, SpeculationError, accept, judge};
use flash_sampling_core::{Domain, Noise, RowError, RowParams, Samples};

const V: usize = 6;
const BLOCK: u64 = 3;
const LENGTH: usize = 4;
/// The number of sequences.
fn sequences() -> u64 {
    if effort() == Effort::Sample { 50_000 } else { 150_000 }
}

/// Returns the target's logits after token `last`.
fn target(last: u32) -> [f32; V] {
    core::array::from_fn(|t| ((t as u32 * 5 + last * 3) % 7) as f32 * 0.5 - if t as u32 == last { 2.0 } else { 0.0 })
}

/// Returns the draft's law after token `last`. Some tokens have probability 0.
fn draft(last: u32) -> [f32; V] {
    let logits: [f32; V] = core::array::from_fn(|t| ((t as u32 * 3 + last) % 5) as f32 * 0.6);
    let none = |t: usize| (t as u32 + last).is_multiple_of(4);
    let kept: Vec<f32> = (0..V).map(|t| if none(t) { f32::NEG_INFINITY } else { logits[t] }).collect();
    let law = softmax(&kept);
    core::array::from_fn(|t| law[t] as f32)
}

/// Draws from a law with the token noise of a position, like a sampler.
fn draw(noise: &Noise, law: &[f64]) -> u32 {
    let score = |t: u32| law[t as usize].ln() + f64::from(noise.gumbel(Domain::Token, 0, t));
    (0..V as u32).max_by(|&a, &b| score(a).total_cmp(&score(b))).unwrap()
}

/// A function that accepts or replaces a draft token.
type Judge = dyn Fn(&RowParams<'_>, &[f32], u32, &[f32; V]) -> Judgement;

/// Returns the first tokens that are emitted after token 0.
fn emit(seed: u64, params: RowParams<'_>, law: &dyn Fn(u32) -> Vec<f64>, judge: &Judge) -> Vec<usize> {
    let noise = |position| Noise::new(seed, position).unwrap();
    let (mut tokens, mut last, mut position) = (Vec::new(), 0u32, 0);
    while tokens.len() < LENGTH {
        let mut all_accepted = true;
        // The whole block is drafted before its first token is judged.
        let mut context = last;
        let block: Vec<(u32, u32)> = (position..position + BLOCK)
            .map(|p| {
                let drafted = draw(&noise(p), &draft(context).map(f64::from));
                (core::mem::replace(&mut context, drafted), drafted)
            })
            .collect();
        for (context, drafted) in block {
            let row = RowParams { seed, position, ..params };
            let judgement = judge(&row, &target(context), drafted, &draft(context));
            last = if let Judgement::Replaced(token) = judgement { token } else { drafted };
            tokens.push(last as usize);
            position += 1;
            all_accepted = judgement == Judgement::Accepted;
            if !all_accepted {
                break;
            }
        }
        if all_accepted {
            last = draw(&noise(position), &law(last));
            tokens.push(last as usize);
            position += 1;
        }
    }
    tokens.truncate(LENGTH);
    tokens
}

/// Returns the p-value of the first tokens of many sequences under the target's law.
fn p_value(params: RowParams<'_>, law: &dyn Fn(u32) -> Vec<f64>, judge: &Judge) -> f64 {
    let mut joint = vec![1.0];
    let mut contexts = vec![0u32];
    for _ in 0..LENGTH {
        let next = |(p, last): (&f64, &u32)| law(*last).into_iter().map(|q| p * q).collect::<Vec<_>>();
        joint = joint.iter().zip(&contexts).flat_map(next).collect();
        contexts = contexts.iter().flat_map(|_| 0..V as u32).collect();
    }
    let cells: Vec<usize> = (0..sequences())
        .map(|seed| emit(seed, params, law, judge).into_iter().fold(0, |cell, token| cell * V + token))
        .collect();
    Bins::of(&joint, &cells, joint.len(), |i| i).chi_square().unwrap().p
}

fn dense(row: &RowParams<'_>, logits: &[f32], token: u32, law: &[f32; V]) -> Judgement {
    judge(logits, row, token, DraftLaw::Dense(law)).unwrap()
}

fn sparse(row: &RowParams<'_>, logits: &[f32], token: u32, law: &[f32; V]) -> Judgement {
    let law: Vec<(u32, f32)> = (0..).zip(*law).filter(|(_, q)| *q > 0.0).collect();
    judge(logits, row, token, DraftLaw::Sparse(&law)).unwrap()
}

#[test]
fn emitted_tokens_follow_the_targets_law() {
    let law = |last: u32| softmax(&target(last));
    for judge in [&dense as &Judge, &sparse] {
        let p = p_value(RowParams::default(), &law, judge);
        println!("p = {p}");
        assert!(p > ALPHA);
    }
}

#[test]
fn emitted_tokens_follow_the_truncated_law() {
    // The three largest logits at temperature 2; of equal logits, the lower token.
    let law = |last: u32| {
        let mut logits = target(last).map(|l| l * 0.5);
        let mut order: Vec<usize> = (0..V).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order[3..].iter().for_each(|&t| logits[t] = f32::NEG_INFINITY);
        softmax(&logits)
    };
    let params = RowParams { temperature: 2.0, top_k: 3, ..RowParams::default() };
    let p = p_value(params, &law, &dense);
    println!("p = {p}");
    assert!(p > ALPHA);
    // The control: the judge does not apply the filters of the law.
    assert!(p_value(RowParams { top_k: 0, ..params }, &law, &dense) < ALPHA);
}

/// Returns a faulty judge: its accept coin or its residual draw reuses the draft's noise, or a replacement has the
/// target's law instead of the residual law.
fn reuses(coin: bool, residual: bool, whole: bool) -> impl Fn(&RowParams<'_>, &[f32], u32, &[f32; V]) -> Judgement {
    move |row, logits, token, law| {
        let noise = Noise::new(row.seed, row.position).unwrap();
        let p = softmax(logits);
        let u = match coin {
            true => (-(-f64::from(noise.gumbel(Domain::Token, 0, token))).exp()).exp(),
            false => noise.coin_of(Domain::Accept, 0, 0),
        };
        if u < p[token as usize] / f64::from(law[token as usize]) {
            return Judgement::Accepted;
        }
        let rest = |t: usize| if whole { p[t] } else { (p[t] - f64::from(law[t])).max(0.0) };
        let domain = if residual { Domain::Token } else { Domain::Residual };
        let score = |t: &u32| rest(*t as usize).ln() + f64::from(noise.gumbel(domain, 0, *t));
        Judgement::Replaced((0..V as u32).max_by(|a, b| score(a).total_cmp(&score(b))).unwrap())
    }
}

#[test]
fn noise_that_is_used_twice_bends_the_law() {
    let law = |last: u32| softmax(&target(last));
    let p = |judge: &Judge| p_value(RowParams::default(), &law, judge);
    let fine = p(&reuses(false, false, false));
    assert!(fine > ALPHA, "without a fault p = {fine}");
    for (what, faulty) in [
        ("the accept coin", p(&reuses(true, false, false))),
        ("the residual draw", p(&reuses(false, true, false))),
        ("the target's law for the residual", p(&reuses(false, false, true))),
    ] {
        println!("{what}: p = {faulty:e}");
        assert!(faulty < ALPHA, "{what} is not rejected: p = {faulty}");
    }
}

#[test]
fn equal_laws_accept_always_and_a_greedy_target_takes_its_argmax() {
    let law: [f32; V] = core::array::from_fn(|t| softmax(&target(1))[t] as f32);
    let greedy = RowParams { temperature: 0.0, ..RowParams::default() };
    let best = (0..V as u32).rev().max_by(|&a, &b| target(1)[a as usize].total_cmp(&target(1)[b as usize])).unwrap();
    let mut replaced = 0;
    for position in 0..2000 {
        for token in 0..V as u32 {
            let row = RowParams { position, ..RowParams::default() };
            // The rounding of the draft's law to float32 may replace a few tokens.
            replaced += u32::from(dense(&row, &target(1), token, &law) != Judgement::Accepted);
            let want = if token == best { Judgement::Accepted } else { Judgement::Replaced(best) };
            assert_eq!(dense(&RowParams { position, ..greedy }, &target(1), token, &law), want);
        }
    }
    assert!(replaced <= 2, "{replaced} of 12000 tokens replaced");
}

#[test]
fn laws_and_rows_that_mean_nothing_are_errors() {
    let row = RowParams::default();
    let of = |first: &[f32], token| {
        let mut law = [0.0; V];
        law[..first.len()].copy_from_slice(first);
        judge(&[0.0; V], &row, token, DraftLaw::Dense(&law)).unwrap_err()
    };
    assert!(matches!(of(&[0.5, 0.5], 3), SpeculationError::Draft { token: 3, .. }));
    assert!(matches!(of(&[0.5, f32::NAN, 0.5], 0), SpeculationError::Draft { token: 1, .. }));
    assert!(matches!(of(&[1.5, -0.5], 0), SpeculationError::Draft { token: 0, .. }));
    assert_eq!(of(&[0.5, 0.4], 0).to_string(), "the draft's law must sum to 1");
    let of = |law: &[(u32, f32)]| judge(&[0.0; V], &row, 2, DraftLaw::Sparse(law)).unwrap_err().to_string();
    // A search for the drawn token could miss it in an unsorted list.
    assert_eq!(of(&[(2, 0.5), (1, 0.25), (0, 0.25)]), "the draft's law must have its tokens strictly ascending");
    assert_eq!(of(&[(2, 0.5), (2, 0.5)]), "the draft's law must have its tokens strictly ascending");
    assert_eq!(of(&[(2, 0.5)]), "the draft's law must sum to 1");
    assert_eq!(of(&[(1, 1.0)]), "the draft's probability of token 2 must be above 0: it was drawn");
    let says = "the draft's law must be over the vocabulary of the logits";
    assert_eq!(of(&[(2, 0.5), (V as u32, 0.5)]), says);
    for len in [V - 1, V + 1] {
        let mut law = vec![0.0; len];
        law[2] = 1.0;
        assert_eq!(judge(&[0.0; V], &row, 2, DraftLaw::Dense(&law)).unwrap_err().to_string(), says);
    }
    // Requests for more results change no judgement.
    let told = RowParams { logprobs: Some(3), kept: true, ..row };
    let law = DraftLaw::Sparse(&[(2, 1.0)]);
    assert_eq!(judge(&[0.0; V], &told, 2, law).unwrap(), judge(&[0.0; V], &row, 2, law).unwrap());
    let dead = judge(&[f32::NEG_INFINITY; V], &row, 0, DraftLaw::Sparse(&[(0, 1.0)])).unwrap_err();
    assert!(matches!(dead, SpeculationError::Row { index: 0, error: RowError::NoFiniteLogit }));
    let wrong = RowParams { top_p: 0.0, ..row };
    let invalid = judge(&[0.0; V], &wrong, 0, DraftLaw::Sparse(&[(0, 1.0)])).unwrap_err();
    assert_eq!(invalid.to_string(), "row 0 of the block: top_p is 0.0, but must be above 0 and at most 1");
}

#[test]
fn a_block_needs_a_row_more_than_tokens() {
    for (first_row, rows) in [(0, 0), (7, 0)] {
        let error = accept(&Samples::new(), first_row, &[4, 5]).unwrap_err();
        assert!(matches!(error, SpeculationError::Block { rows: found, tokens: 2 } if found == rows));
    }
}
