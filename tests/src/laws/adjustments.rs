//! Laws of draws under masks, biases, bans and penalties: the frequency of each token, and the reference's bits.

use crate::laws::knobs::refused_by_name;
use crate::logits::{TOKEN_STRIDE, spread, spread_index};
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::statistics::Bins;
use crate::trial::{RowBits, Trial, drawn, rows_of_call};
use flash_sampling_core::{DType, History, Knobs, PerturbedArgmax, Plan, RowParams, Samples};

/// Logits of both signs, because a repetition penalty treats the signs differently. Token `i * TOKEN_STRIDE` has logit `i`;
/// comments and expected changes use `i`.
const LOGITS: [f32; 12] = [1.5, 1.0, 0.5, 0.25, 0.0, -0.25, -0.5, -0.75, -1.0, -1.25, -1.5, -2.0];
const TEMPERATURE: f32 = 0.8;
const PROMPT: [u32; 3] = [0, 6, 9];
const OUTPUT: [u32; 6] = [1, 2, 3, 1, 1, 2];
const ROWS: usize = 32;
const DRAWS: u32 = 8;

/// A row, and the expected change of its logits in float64, before the temperature.
struct Case<'a> {
    what: &'static str,
    row: RowParams<'a>,
    logit: fn(u32, f64) -> f64,
}

fn generated(token: u32) -> f64 {
    OUTPUT.iter().filter(|&&t| t == token).count() as f64
}

/// Applies the repetition penalty by its definition, which includes the tokens of the prompt.
fn repeated(token: u32, logit: f64, penalty: f64) -> f64 {
    match PROMPT.contains(&token) || OUTPUT.contains(&token) {
        true if logit > 0.0 => logit / penalty,
        true => logit * penalty,
        false => logit,
    }
}

fn without(tokens: &[u32], token: u32, logit: f64) -> f64 {
    if tokens.contains(&token) { f64::NEG_INFINITY } else { logit }
}

/// Returns the bitmap over all tokens for a mask with one bit per entry of [`LOGITS`].
fn mask(bits: u32) -> Vec<u32> {
    let mut out = vec![0; LOGITS.len() * TOKEN_STRIDE as usize / 32 + 1];
    for token in (0..32).filter(|t| bits >> t & 1 == 1).map(|t| t * TOKEN_STRIDE as usize) {
        out[token / 32] |= 1 << (token % 32);
    }
    out
}

/// Returns one case per knob, and a case with all knobs.
fn cases<'a>(history: &'a History, masks: &'a [Vec<u32>; 2]) -> Vec<Case<'a>> {
    let base = RowParams { temperature: TEMPERATURE, history: Some(history), ..RowParams::default() };
    let case = |what, row, logit| Case { what, row, logit };
    vec![
        case("temperature", base, |_, l| l),
        case("mask", RowParams { mask: Some(&masks[0]), ..base }, |t, l| without(&[1, 3, 6, 7, 10], t, l)),
        case(
            "logit_bias",
            RowParams {
                logit_bias: &[(0, f32::NEG_INFINITY), (2 * TOKEN_STRIDE, 1.0), (11 * TOKEN_STRIDE, 2.5)],
                ..base
            },
            |t, l| {
                [(0, f64::NEG_INFINITY), (2, 1.0), (11, 2.5)].iter().fold(l, |l, b| if b.0 == t { l + b.1 } else { l })
            },
        ),
        case("banned", RowParams { banned: &[5 * TOKEN_STRIDE, 0], ..base }, |t, l| without(&[0, 5], t, l)),
        case(
            "min_tokens 7 of 6",
            RowParams { min_tokens: 7, stop_token_ids: &[4 * TOKEN_STRIDE, TOKEN_STRIDE], ..base },
            |t, l| without(&[1, 4], t, l),
        ),
        case(
            "min_tokens 6 of 6",
            RowParams { min_tokens: 6, stop_token_ids: &[4 * TOKEN_STRIDE, TOKEN_STRIDE], ..base },
            |_, l| l,
        ),
        case("repetition_penalty", RowParams { repetition_penalty: 1.5, ..base }, |t, l| repeated(t, l, 1.5)),
        case("frequency_penalty", RowParams { frequency_penalty: 0.5, ..base }, |t, l| l - 0.5 * generated(t)),
        case("presence_penalty", RowParams { presence_penalty: -0.75, ..base }, |t, l| {
            l + 0.75 * generated(t).min(1.0)
        }),
        // The sequence ends with "1 2", which 3 followed before: a match of two tokens, one above the allowed length.
        case("DRY", RowParams { dry_multiplier: 0.75, dry_base: 2.0, dry_allowed_length: 1, ..base }, |t, l| {
            if t == 3 { l - 1.5 } else { l }
        }),
        // The breaker reduces the match "1 2" to "2".
        case(
            "DRY with a breaker",
            RowParams {
                dry_multiplier: 0.75,
                dry_base: 2.0,
                dry_allowed_length: 1,
                dry_sequence_breakers: &[TOKEN_STRIDE],
                ..base
            },
            |t, l| if t == 3 { l - 0.75 } else { l },
        ),
        case(
            "all",
            RowParams {
                mask: Some(&masks[1]),
                logit_bias: &[(TOKEN_STRIDE, 1.0), (6 * TOKEN_STRIDE, 1.5)],
                banned: &[4 * TOKEN_STRIDE],
                min_tokens: 100,
                stop_token_ids: &[0],
                repetition_penalty: 1.25,
                frequency_penalty: 0.25,
                presence_penalty: 0.5,
                dry_multiplier: 0.5,
                dry_base: 1.5,
                ..base
            },
            |t, l| {
                let biased = l + if t == 1 { 1.0 } else { 0.0 } + if t == 6 { 1.5 } else { 0.0 };
                let dry = if t == 3 { 0.5 } else { 0.0 };
                let penalties = 0.25 * generated(t) + 0.5 * generated(t).min(1.0) + dry;
                without(&[10, 4, 0], t, repeated(t, biased, 1.25) - penalties)
            },
        ),
    ]
}

/// Computes the softmax at the temperature, in float64.
fn law(logit: fn(u32, f64) -> f64) -> Vec<f64> {
    let adjusted = (0..).zip(LOGITS).map(|(t, l)| logit(t, f64::from(l)) / f64::from(TEMPERATURE));
    let weights: Vec<f64> = adjusted.map(f64::exp).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|w| w / sum).collect()
}

pub(super) fn adjusted_draws_follow_their_softmax(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let plan = Plan { max_rows: ROWS, max_draws: DRAWS, ..Plan::default() };
    let can = refused_by_name(trial, report, Knobs::ADJUSTMENTS, plan)?;
    let problem = Problem::of_logits(&spread(&LOGITS), ROWS);
    let mut history = History::new(&PROMPT.map(|t| t * TOKEN_STRIDE));
    history.extend(OUTPUT.map(|t| t * TOKEN_STRIDE));
    let mut sampler = trial.sampler(problem.head(), plan)?;
    let masks = [0xb35, 0xbff].map(mask);
    let all = cases(&history, &masks);
    let count = all.len();
    for (i, Case { what, row, logit }) in all.into_iter().enumerate() {
        if !row.enabled().without(can).is_empty() {
            continue;
        }
        let law = law(logit);
        let row = RowParams { seed: 990 + i as u64, draws: DRAWS, ..row };
        let calls = (0..trial.draws(40) as u64).map(|call| rows_of_call(row, call, ROWS));
        let tokens: Vec<_> = drawn(&mut *sampler, &problem, calls)?.iter().map(|d| spread_index(d.token)).collect();
        let forbidden = tokens.iter().find(|&&t| law.get(t).is_none_or(|&p| p == 0.0));
        ensure!(forbidden.is_none(), "{what}: {forbidden:?} came, which cannot");
        let outcome = Bins::of(&law, &tokens, law.len(), |t| t).chi_square();
        report.p_value(format!("{what}: tokens, chi-square"), tokens.len(), outcome);
        (trial.progress)((i + 1) as f64 / count as f64);
    }
    Ok(())
}

pub(super) fn penalties_have_the_reference_bits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    const SIZE: Size = Size::new(4, 1003, 40);
    const PLAN: Plan = Plan { max_rows: 4, max_draws: 12, max_logprobs: Some(5), canonical: false };
    let can = refused_by_name(trial, report, Knobs::ADJUSTMENTS, PLAN)?;
    if can.is_empty() {
        return Ok(());
    }
    let problem = Problem::integers(SIZE, DType::BF16, DType::BF16, 950);
    let Some(mut reference) = trial.reference(problem.head(), PLAN) else { return Ok(()) };
    let prompt: Vec<u32> = (0..400).map(|i| i * 7 % 1003).collect();
    let mut history = History::new(&prompt);
    history.extend((0..300).map(|i| i * i % 211));
    let base = RowParams {
        seed: 95,
        temperature: 0.7,
        draws: 12,
        history: Some(&history),
        logprobs: Some(3),
        ..RowParams::default()
    };
    let banned: Vec<u32> = (0..900).rev().collect();
    let cases = [
        ("history alone", base),
        ("repetition", RowParams { repetition_penalty: 1.3, ..base }),
        ("repetition below 1", RowParams { repetition_penalty: 0.5, ..base }),
        ("frequency", RowParams { frequency_penalty: 0.75, ..base }),
        ("presence", RowParams { presence_penalty: -1.5, ..base }),
        ("DRY", RowParams { dry_multiplier: 0.75, dry_base: 1.5, dry_sequence_breakers: &[3, 40], ..base }),
        ("DRY over too few tokens", RowParams { dry_multiplier: 0.75, dry_penalty_last_n: 2, ..base }),
        ("bans", RowParams { banned: &banned, ..base }),
        ("stops before min_tokens", RowParams { min_tokens: 301, stop_token_ids: &banned, ..base }),
        ("stops after min_tokens", RowParams { min_tokens: 300, stop_token_ids: &banned, ..base }),
        (
            "all",
            RowParams {
                repetition_penalty: 1.2,
                frequency_penalty: 0.5,
                presence_penalty: 0.25,
                dry_multiplier: 0.25,
                dry_allowed_length: 1,
                banned: &[3, 1, 900],
                logit_bias: &[(0, 1.5), (7, -2.0), (1002, 3.0)],
                ..base
            },
        ),
    ];
    let (mut out, mut want) = (Samples::new(), Samples::new());
    let mut sampler = trial.sampler(problem.head(), PLAN)?;
    let (mut plain, mut compared) = (None, 0);
    for (what, row) in cases.into_iter().filter(|(_, row)| row.enabled().without(can).is_empty()) {
        let rows = [0, 1, 2, 3].map(|position| RowParams { position, ..row });
        sampler.sample(problem.input(), &rows, &mut out)?;
        reference.sample(problem.input(), &rows, &mut want)?;
        RowBits::same(&out, &want, what)?;
        let found = RowBits::all(&out);
        compared += 48;
        let plain = plain.get_or_insert_with(|| found.clone());
        let idle = matches!(what, "history alone" | "stops after min_tokens" | "DRY over too few tokens");
        ensure!((found == *plain) == idle, "{what}: the knob changes nothing, or changes what it must not");
    }
    report.agreed("draws under penalties and bans", compared);
    Ok(())
}
