//! Runs the kernels of log-probabilities and kept tokens on the processor. The system's C++ compiler builds the kernels'
//! own headers, and the test compares every value with the reference.

use crate::emulated::{self, Input, Output};
use flash_sampling_core::backend::{Adjustments, MassHistogram};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{
    Head, History, LogprobsMode, Matrix, PerturbedArgmax, Plan, RowError, RowParams, Samples, f16,
};
use std::path::PathBuf;
use std::sync::LazyLock;

static PROGRAM: LazyLock<Option<PathBuf>> = LazyLock::new(|| emulated::program("row_logprobs"));

/// A value that no kernel writes.
const UNTOUCHED: i32 = 7;

/// The results of a row in one law: log Z, log-probability, rank, the most probable tokens, and the log-probabilities of
/// the tokens of `given`.
#[derive(Clone, Debug, PartialEq)]
struct Law {
    log_z: u64,
    log_prob: u32,
    rank: i32,
    top: Vec<(i32, u32)>,
    given: [u32; 3],
}

impl Law {
    /// The results of a row without a draw.
    fn none(top_n: usize) -> Law {
        let nothing = f32::NEG_INFINITY.to_bits();
        let (top, given) = (vec![(-1, nothing); top_n], [nothing; 3]);
        Law { log_z: f64::NEG_INFINITY.to_bits(), log_prob: nothing, rank: 0, top, given }
    }
}

/// A row with its raw logits.
struct Case<'a> {
    params: RowParams<'a>,
    logits: &'a [f32],
    /// Whether an earlier kernel found an invalid parameter.
    is_invalid: bool,
}

/// The reference's result of a case: the draw, both laws, and the kept tokens.
struct Wanted {
    draw: Option<(u32, f32, f32)>,
    laws: [Law; 2],
    kept: Vec<i32>,
}

/// The bits of a float, where zero has one sign: a dot product is never -0.
fn bits(x: f32) -> u32 {
    (x + 0.0).to_bits()
}

/// Tokens with requested log-probabilities: any token, the first of the largest raw logits, and one outside of the
/// vocabulary.
fn given(r: usize, first: usize, logits: &[f32]) -> [i64; 3] {
    let largest = (0..logits.len()).fold(0, |best, t| if logits[t] > logits[best] { t } else { best });
    let outside = if r.is_multiple_of(2) { (first + logits.len()) as i64 } else { first as i64 - 1 };
    [(first + 97 * r % logits.len()) as i64, (first + largest) as i64, outside]
}

fn has_filters(params: &RowParams<'_>) -> bool {
    params.temperature > 0.0 && (params.top_k > 0 || params.top_p < 1.0 || params.min_p > 0.0)
}

fn wanted(r: usize, case: &Case<'_>, (first, vocab_size): (usize, usize), top_n: usize) -> Wanted {
    let tokens = given(r, first, case.logits).map(|token| token as u32);
    let head = Head::shard(Matrix::new(case.logits, case.logits.len(), 1).unwrap(), first, vocab_size).unwrap();
    let plan = Plan { max_logprobs: Some(top_n as u32), ..Plan::default() };
    let mut reference = Reference::new(head, plan, ReferenceVariant::Tiled);
    let mut sample = |logprobs_mode| {
        let (mut out, kept) = (Samples::new(), has_filters(&case.params));
        let (logprobs, logprob_token_ids) = (Some(top_n as u32), &tokens[..2]);
        let row = RowParams { logprobs, logprob_token_ids, ranks: true, logprobs_mode, kept, ..case.params };
        reference.sample(Matrix::new(&[1f32], 1, 1).unwrap(), &[row], &mut out).unwrap();
        out
    };
    let mut result = Wanted { draw: None, laws: [Law::none(top_n), Law::none(top_n)], kept: Vec::new() };
    for (mode, law) in [LogprobsMode::Processed, LogprobsMode::Raw].into_iter().zip(&mut result.laws) {
        let out = sample(mode);
        let row = match out.row(0) {
            Ok(row) => row,
            Err(RowError::NaN { .. } | RowError::NoFiniteLogit) => return result,
            Err(error) => panic!("{error}"),
        };
        let draw = row.draws[0];
        result.draw = Some((draw.token, draw.score, draw.logit));
        if case.is_invalid {
            return result;
        }
        law.log_z = row.log_z.unwrap().to_bits();
        law.log_prob = bits(row.draw_log_prob(0).unwrap() as f32);
        law.rank = row.ranks[0] as i32;
        let top = row.top_log_probs().map(|(token, nats)| (token as i32, bits(nats as f32)));
        top.zip(&mut law.top).for_each(|(found, slot)| *slot = found);
        let tokens = row.token_log_probs().map(|(_, nats)| bits(nats as f32));
        tokens.zip(&mut law.given).for_each(|(found, slot)| *slot = found);
        if let Some(kept) = row.kept {
            let is_kept = |token: &i32| kept.tokens[*token as usize / 32] >> (token % 32) & 1 == 1;
            result.kept = (0..vocab_size as i32).filter(is_kept).collect();
        }
    }
    result
}

fn input_of(
    cases: &[Case<'_>],
    wanted: &[Wanted],
    [first_row, launch_rows, first, top_n, capacity]: [usize; 5],
) -> Input {
    let tokens = cases[0].logits.len();
    let mut input = Input::default();
    input.put([cases.len(), first_row, launch_rows, first, tokens, top_n, capacity].map(|number| number as u32));
    input.put_all(MassHistogram::weights().iter().copied());
    let mut adjustments = Adjustments::default();
    adjustments.collect_within(cases.iter().map(|case| &case.params), first as u32..(first + tokens) as u32);
    for (r, (case, wanted)) in cases.iter().zip(wanted).enumerate() {
        let RowParams { temperature, top_k, top_p, min_p, mask, .. } = case.params;
        let mask = mask.unwrap_or_default();
        input.put(if temperature == 0.0 { 1.0 } else { 1.0 / temperature });
        input.put(mask.len() as u32);
        input.put_all(mask.iter().copied());
        let list = adjustments.row(r);
        input.put(list.len() as u32);
        for item in list {
            input.put(item.token);
            input.put([item.bias, item.repetition, item.subtract]);
        }
        let is_filtered = has_filters(&case.params);
        let ln_min_p = if is_filtered && min_p > 0.0 { f64::from(min_p).ln() } else { f64::NEG_INFINITY };
        let (top_p, top_k) = if is_filtered { (top_p, top_k) } else { (1.0, 0) };
        input.put(ln_min_p);
        input.put([top_p.to_bits(), top_k, 1f32.to_bits(), 0]);
        let (token, score, logit) = wanted.draw.unwrap_or_default();
        // 1: no finite logit.
        input.put([token, score.to_bits(), logit.to_bits(), wanted.draw.is_none().into(), case.is_invalid.into()]);
        input.put(given(r, first, case.logits));
        input.put_all(case.logits.iter().copied());
        let largest = |granule: &[f32]| f16::from_f32(granule.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        input.put_all(case.logits.chunks(16).map(|granule| largest(granule).to_bits()));
    }
    input
}

/// Takes the results of all rows in one law from the output.
fn law(output: &mut Output, rows: usize, top_n: usize) -> Vec<Law> {
    let mut laws = vec![Law::none(top_n); rows];
    laws.iter_mut().for_each(|law| law.log_z = output.take());
    laws.iter_mut().for_each(|law| law.log_prob = bits(output.take()));
    laws.iter_mut().for_each(|law| law.rank = output.take());
    laws.iter_mut().flat_map(|law| &mut law.top).for_each(|top| top.0 = output.take());
    laws.iter_mut().flat_map(|law| &mut law.top).for_each(|top| top.1 = bits(output.take()));
    laws.iter_mut().flat_map(|law| &mut law.given).for_each(|nats| *nats = bits(output.take()));
    laws
}

/// Compares the results of a call over a vocabulary from `first` on with the reference. `room` is the part of the kept
/// tokens, in thirds, for which there is room.
fn check(cases: &[Case<'_>], first: usize, [first_row, launch_rows, top_n, room]: [usize; 4], what: &str) {
    let Some(program) = &*PROGRAM else { return };
    let tokens = cases[0].logits.len();
    let of_case = |(r, case)| wanted(r, case, (first, first + tokens), top_n);
    let wanted: Vec<_> = cases.iter().enumerate().map(of_case).collect();
    let all: Vec<i32> = wanted.iter().flat_map(|wanted| wanted.kept.iter().copied()).collect();
    let begin = if first_row > 0 { 3 } else { 0 };
    let capacity = begin + all.len() * room / 3;
    let input = input_of(cases, &wanted, [first_row, launch_rows, first, top_n, capacity]);
    let mut output = emulated::answer(program, input);
    for (at, name) in ["processed", "raw"].into_iter().enumerate() {
        for (r, found) in law(&mut output, cases.len(), top_n).into_iter().enumerate() {
            assert_eq!(found, wanted[r].laws[at], "{what}: {name} law of row {r}, {:?}", cases[r].params);
        }
    }
    let ends = wanted.iter().scan(begin, |end, wanted| {
        *end += wanted.kept.len();
        Some(*end)
    });
    for (r, want) in [begin].into_iter().chain(ends).enumerate() {
        assert_eq!(output.take::<u64>(), want as u64, "{what}: begin of row {r}");
    }
    for at in 0..capacity {
        let want = at.checked_sub(begin).and_then(|at| all.get(at)).copied().unwrap_or(UNTOUCHED);
        assert_eq!(output.take::<i32>(), want, "{what}: kept token {at}");
    }
    assert!(output.is_empty());
}

#[test]
fn log_probabilities_and_kept_tokens_are_those_of_the_reference() {
    let spread = |t: u32| (t.wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 24) as f32;
    const TOKENS: u32 = 4500;
    let shapes: [(&str, &dyn Fn(u32) -> f32); 6] = [
        ("peaked", &|t| 30.0 * spread(t).powi(4) - 12.0),
        ("flat", &|t| 2.0 * spread(t)),
        ("equal", &|t| if t % 7 == 0 { f32::NEG_INFINITY } else { 0.0 }),
        ("steps", &|t| (40.0 * spread(t)).floor() / 2.0 - 10.0),
        ("huge", &|t| 3e6 + (100.0 * spread(t)).floor()),
        ("signs", &|t| if t % 3 == 0 { -0.0 } else { 1e-3 * (spread(t) - 0.5) }),
    ];
    let mut history = History::new(&(0..40).map(|t| (t * t + 3) % TOKENS).collect::<Vec<_>>());
    history.extend((0..60).map(|t| (t * 7) % 100));
    let history = Some(&history);
    for (s, (name, logit)) in shapes.into_iter().enumerate() {
        let first = [0, 5, 256][s % 3];
        let mask: Vec<u32> = (0..(TOKENS + 300) / 32).map(|word| 0x9e37_79b9u32.wrapping_mul(word + 1)).collect();
        let mut one = vec![0u32; mask.len()];
        one[20] = 1 << 9;
        let none = vec![0u32; mask.len()];
        let logits: Vec<f32> = (0..TOKENS).map(logit).collect();
        let mut with_nan = logits.clone();
        with_nan[700] = f32::NAN;
        let base = RowParams { seed: 3 + s as u64, position: 9, temperature: 0.8, ..RowParams::default() };
        let rows = [
            base,
            RowParams { temperature: 0.0, top_k: 3, ..base },
            RowParams { top_k: 20, ..base },
            RowParams { top_p: 0.9, ..base },
            RowParams { min_p: 0.05, mask: Some(&mask), ..base },
            RowParams { repetition_penalty: 1.3, frequency_penalty: 0.2, history, ..base },
            RowParams { presence_penalty: 0.5, logit_bias: &[(300, 2.0), (1700, 1.0)], history, top_k: 900, ..base },
            RowParams { banned: &[305, 306, 2000], top_k: 50, top_p: 0.8, mask: Some(&mask), ..base },
            RowParams { temperature: 20.0, min_p: 0.02, top_k: 700, top_p: 0.5, ..base },
            RowParams { mask: Some(&one), ..base },
            RowParams { mask: Some(&one), top_p: 0.5, ..base },
            RowParams { temperature: 20.0, min_p: 0.3, ..base },
            RowParams { mask: Some(&none), top_k: 5, ..base },
            RowParams { top_k: 1, ..base },
            RowParams { top_p: 0.999_9, ..base },
        ];
        let mut cases: Vec<_> =
            rows.iter().map(|&params| Case { params, logits: &logits, is_invalid: false }).collect();
        cases.push(Case { params: base, logits: &with_nan, is_invalid: false });
        cases.push(Case { params: rows[2], logits: &logits, is_invalid: true });
        cases.push(Case { params: rows[3], logits: &logits, is_invalid: false });
        let sizes = [[0, 18, 20, 4], [2, 7, 5, 2], [0, 5, 128, 3], [1, 20, 0, 3], [0, 9, 1, 0], [3, 18, 20, 3]][s];
        check(&cases, first, sizes, name);
    }
}
