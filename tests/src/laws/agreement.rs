//! Agreement with the float64 reference.

use crate::laws::knobs::one_of_each;
use crate::logits::LogitShape;
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::shared_reference::SharedReference;
use crate::trial::{DTYPES, RowBits, Trial};
use flash_sampling_core::backend::Winner;
use flash_sampling_core::backend::canonical::{dot_error_bound, largest_norm, norm};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    DType, Domain, Draw, Exactness, History, Knob, Knobs, Noise, PerturbedArgmax, Plan, RowParams, SampleError, Samples,
};

fn rows(count: usize, draws: u32, logprobs: Option<u32>) -> Vec<RowParams<'static>> {
    let row = |r: usize| RowParams {
        seed: 77 + r as u64 / 2,
        position: r as u64 % 2 * 1000,
        temperature: [1.0, 0.8, 1.0, 0.0, 2.5][r % 5],
        draws,
        logprobs,
        ..RowParams::default()
    };
    (0..count).map(row).collect()
}

/// Returns the noise of a draw.
fn gumbel(row: &RowParams<'_>, draw: u32, token: u32) -> Result<f32, Broken> {
    let noise = Noise::new(row.seed, row.position).ok_or(Broken("the position is valid".into()))?;
    Ok(if row.temperature == 0.0 { 0.0 } else { noise.gumbel(Domain::Token, draw, token) })
}

pub(super) fn exact_inputs_have_the_reference_bits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let sizes = [Size::new(7, 1003, 64), Size::new(5, 257, 1), Size::new(9, 2050, 33)];
    for (i, (weight, hidden)) in DTYPES.into_iter().enumerate() {
        let mut compared = 0;
        for size in sizes {
            let problem = Problem::integers(size, weight, hidden, 31 + i as u64);
            let plan = Plan { max_rows: size.rows, max_draws: 6, max_logprobs: Some(5), canonical: false };
            let rows = rows(size.rows, 6, Some(5));
            let Some(want) = trial.expected(&problem, plan, &rows)? else {
                report.note("this factorisation has no reference; its laws are checked by statistics");
                return Ok(());
            };
            let found = trial.sample(&problem, plan, &rows)?;
            RowBits::same(&found, &want, format!("{} x {}, {size:?}", weight.name(), hidden.name()))?;
            compared += size.rows * 6;
        }
        report.agreed(format!("draws on integers, {} x {}", weight.name(), hidden.name()), compared);
        (trial.progress)((i + 1) as f64 / DTYPES.len() as f64);
    }
    Ok(())
}

/// Compares all draws from rows of these logits with the reference; returns false if there is no reference.
fn draws_agree(
    trial: &Trial<'_>,
    report: &mut LawReport,
    what: &str,
    logits: &[f32],
    (rows, draws, calls): (usize, u32, u64),
) -> Result<bool, Broken> {
    let problem = Problem::of_logits(logits, rows);
    let plan = Plan { max_rows: rows, max_draws: draws, ..Plan::default() };
    let Some(mut reference) = trial.reference(problem.head(), plan) else {
        report.note("this factorisation has no reference; its laws are checked by statistics");
        return Ok(false);
    };
    let mut sampler = trial.sampler(problem.head(), plan)?;
    let (mut found, mut want) = (Samples::new(), Samples::new());
    for call in 0..calls {
        let params: Vec<RowParams<'_>> = (0..rows as u64)
            .map(|r| RowParams { seed: 71, position: call * rows as u64 + r, draws, ..RowParams::default() })
            .collect();
        sampler.sample(problem.input(), &params, &mut found)?;
        reference.sample(problem.input(), &params, &mut want)?;
        for r in 0..rows {
            for (n, (found, want)) in found.row(r)?.draws.iter().zip(want.row(r)?.draws).enumerate() {
                ensure!(
                    found.token == want.token && found.score.to_bits() == want.score.to_bits(),
                    "{what}, call {call}, row {r}, draw {n}: {found:?}, the reference has {want:?}"
                );
            }
        }
    }
    report.agreed(format!("draws of {what}"), calls as usize * rows * draws as usize);
    Ok(true)
}

/// Compares many draws, because backends compute noise only for tokens that a bound does not exclude. Only this law
/// detects a bound that is wrong once in many thousand draws.
pub(super) fn many_draws_have_the_reference_bits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let calls = trial.draws(4) as u64;
    for (i, (shape, shift)) in
        [(LogitShape::Gaussian, 0.0), (LogitShape::Flat, -20.0), (LogitShape::LlmLike, 300.0)].into_iter().enumerate()
    {
        let logits: Vec<f32> = shape.logits(67, 70).iter().map(|l| l + shift).collect();
        let what = format!("{shape:?} logits shifted by {shift}");
        if !draws_agree(trial, report, &what, &logits, (64, 256, calls))? {
            break;
        }
        (trial.progress)((i + 1) as f64 / 3.0);
    }
    Ok(())
}

/// Compares draws beside logits of -1e4 to -1e9, which models often give to hidden tokens. A bound for such logits has
/// a large rounding error, and must not be applied to the logits of other tokens.
pub(super) fn low_logits_change_no_draw(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let calls = trial.draws(1) as u64;
    for (i, power) in [14, 23, 30].into_iter().enumerate() {
        let mut logits = LogitShape::Gaussian.logits(1347, 72);
        for (token, logit) in logits.iter_mut().enumerate() {
            // Weights with an f16 factor hold multiples of 2^-10 beside the lowest logit.
            *logit =
                if token < 513 || token % 300 == 0 { -(2f32.powi(power)) } else { (*logit * 1024.0).round() / 1024.0 };
        }
        if !draws_agree(trial, report, &format!("tokens behind logits of -2^{power}"), &logits, (16, 64, calls))? {
            break;
        }
        (trial.progress)((i + 1) as f64 / 3.0);
    }
    Ok(())
}

pub(super) fn real_inputs_stay_within_the_rounding_bound(
    trial: &Trial<'_>,
    report: &mut LawReport,
) -> Result<(), Broken> {
    let size = Size::new(10, 1537, 320);
    let pathwise = trial.capabilities()?.exactness == Exactness::Pathwise;
    for (weight, hidden) in DTYPES {
        let problem = Problem::gaussian(size, weight, hidden, 41);
        let plan = Plan { max_rows: size.rows, max_draws: 16, ..Plan::default() };
        let rows = rows(size.rows, 16, None);
        let found = trial.sample(&problem, plan, &rows)?;
        let weight_norm = largest_norm(&problem.weight.matrix());
        let want = trial.expected(&problem, plan, &rows)?.unwrap_or_default();
        let (mut worst, mut mismatches) = (0.0f64, 0);
        for (r, row) in rows.iter().enumerate() {
            let raw = problem.raw_logits(r);
            let inverse = if row.temperature == 0.0 { 1.0 } else { 1.0 / row.temperature };
            let bound = dot_error_bound(size.hidden, weight_norm, norm(&problem.hidden.row(r)));
            let bound = |score: f32| bound * f64::from(inverse) + 4.0 * f64::from(score.abs()) * 2f64.powi(-24);
            let exact = |token: u32| raw[token as usize] * inverse;
            for (n, d) in (0u32..).zip(found.row(r)?.draws) {
                let score = exact(d.token) + gumbel(row, n, d.token)?;
                worst = worst.max(f64::from((d.logit - exact(d.token)).abs()) / bound(d.logit));
                worst = worst.max(f64::from((d.score - score).abs()) / bound(d.score.abs().max(d.logit.abs())));
                if want.is_empty() {
                    continue;
                }
                let best: Draw = want.row(r)?.draws[n as usize];
                if best.token != d.token {
                    mismatches += 1;
                    let gap = f64::from(best.score - score);
                    ensure!(
                        !(pathwise || row.temperature == 0.0) || gap <= 2.0 * bound(best.score),
                        "row {r}, draw {n}: token {} has score {score}, token {} has {}",
                        d.token,
                        best.token,
                        best.score
                    );
                }
            }
        }
        let draws = size.rows * 16;
        let pair = format!("{} x {}", weight.name(), hidden.name());
        report.at_most(format!("largest error over its bound, {pair}"), draws, worst, 1.0);
        report.at_most(format!("tokens changed by near ties, {pair}"), draws, f64::from(mismatches), 2.0);
    }
    Ok(())
}

/// Returns a problem of near ties: each row of the weight is a copy of one row, with one element changed by its last
/// bit.
fn near_ties(size: Size, dtype: DType) -> Problem {
    let base = Problem::gaussian(size, dtype, dtype, 52);
    let row = base.weight.row(0);
    let step = if dtype == DType::F32 { 2f32.powi(-23) } else { 2f32.powi(-8) };
    let weight = crate::tensor::Tensor::from_fn(dtype, size.vocab, size.hidden, |i, k| {
        if i % size.hidden == k { row[k] + row[k].abs() * step * if i % 2 == 0 { 1.0 } else { -1.0 } } else { row[k] }
    });
    Problem::new(weight, base.hidden)
}

pub(super) fn canonical_plans_have_the_reference_bits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let size = Size::new(10, 1030, 200);
    let plan = Plan { max_rows: size.rows, max_draws: 16, max_logprobs: None, canonical: true };
    let problem = Problem::gaussian(size, DType::BF16, DType::BF16, 51);
    let rows = rows(size.rows, 16, None);
    if !trial.capabilities()?.canonical {
        let refused = match trial.sampler(problem.head(), plan) {
            Err(e) => e.0.contains("canonical"),
            Ok(mut sampler) => matches!(
                sampler.sample(problem.input(), &rows, &mut Samples::new()),
                Err(SampleError::Unsupported { knob: Knob::Canonical })
            ),
        };
        ensure!(refused, "the sampler cannot be canonical, but a canonical plan is not refused by name");
        report.agreed("canonical plans refused", 1);
        return Ok(());
    }
    let mut cases = Vec::new();
    for (weight, hidden) in DTYPES {
        let name = format!("{} x {}", weight.name(), hidden.name());
        cases.push((name, Problem::gaussian(size, weight, hidden, 51)));
    }
    for dtype in [DType::BF16, DType::F32] {
        cases.push((format!("near ties, {}", dtype.name()), near_ties(size, dtype)));
    }
    let mut capped = problem.clone();
    capped.bias = Some((0..size.vocab).map(|i| (i % 7) as f32 * 0.1).collect());
    capped.soft_cap = Some(5.0);
    capped.scale = Some(1.25);
    cases.push(("bias, soft-cap and scale".into(), capped));
    // The canonical evaluation of the candidates includes penalties, bans and biases.
    let can = trial.sampler(problem.head(), plan)?.capabilities().knobs;
    let mut history = History::new(&(0..700).chain(0..40).collect::<Vec<u32>>());
    history.extend((0..300).map(|i| i * i % 211));
    let adjusted: Vec<RowParams<'_>> = one_of_each(rows[0], &history)
        .into_iter()
        .filter(|(knob, _)| Knobs::ADJUSTMENTS.intersection(can).contains(*knob))
        .map(|(_, row)| RowParams { logit_bias: &[(4, 1.5), (900, -3.0)], ..row })
        .chain([RowParams { logit_bias: &[(4, 1.5), (900, -30.0)], ..rows[1] }])
        .chain(can.contains(Knob::FrequencyPenalty).then_some(RowParams {
            history: Some(&history),
            repetition_penalty: 1.3,
            frequency_penalty: 0.3,
            presence_penalty: -0.7,
            dry_multiplier: 1.0,
            banned: &[5, 6, 800],
            ..rows[2]
        }))
        .collect();
    for (name, problem) in &cases {
        let scheme = trial.factory.reference_variant(&problem.head()).unwrap_or(ReferenceVariant::Tiled);
        let mut want = Samples::new();
        let part =
            Problem { hidden: problem.hidden.select(&(0..adjusted.len()).collect::<Vec<_>>()), ..problem.clone() };
        let reference = |head, scheme| SharedReference::new(head, plan, scheme, trial.reference_results);
        reference(part.head(), scheme.clone()).sample(part.input(), &adjusted, &mut want)?;
        let found = trial.sample(&part, plan, &adjusted)?;
        RowBits::same(&found, &want, format!("{name}, adjusted"))?;
        report.agreed(format!("draws with a canonical plan and adjustments, {name}"), adjusted.len() * 16);
        reference(problem.head(), scheme).sample(problem.input(), &rows, &mut want)?;
        let found = trial.sample(problem, plan, &rows)?;
        RowBits::same(&found, &want, name)?;
        report.agreed(format!("draws with a canonical plan, {name}"), size.rows * 16);
    }
    Ok(())
}

pub(super) fn scores_are_logit_plus_noise(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let size = Size::new(10, 3001, 50);
    let problem = Problem::gaussian(size, DType::BF16, DType::BF16, 61);
    let rows = rows(size.rows, 16, None);
    let found = trial.sample(&problem, Plan { max_rows: 10, max_draws: 16, ..Plan::default() }, &rows)?;
    for (r, row) in rows.iter().enumerate() {
        for (n, d) in (0u32..).zip(found.row(r)?.draws) {
            let want = Winner::new(d.logit + gumbel(row, n, d.token)?, d.token).score;
            ensure!(
                d.score.to_bits() == want.to_bits(),
                "row {r}, draw {n}, token {}: score {}, but logit and noise make {want}",
                d.token,
                d.score
            );
        }
    }
    report.agreed("scores against logit plus noise", size.rows * 16);
    Ok(())
}
