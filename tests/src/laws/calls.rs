//! The laws of invalid calls and invalid knobs.

use crate::laws::knobs::{one_of_each, refused_by_name};
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::trial::{RowBits, Trial};
use flash_sampling_core::noise::POSITION_MAX;
use flash_sampling_core::{DType, History, Knob, Knobs, LogprobsMode, Plan, RowError, RowParams, SampleError, Samples};

const PLAN: Plan = Plan { max_rows: 64, max_draws: 4, max_logprobs: Some(3), canonical: false };

pub(super) fn impossible_knobs_are_errors(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let capabilities = trial.capabilities()?;
    let history = History::new(&[1, 2, 1]);
    let good = RowParams { seed: 4, ..RowParams::default() };
    let mut rows = vec![
        good,
        RowParams { temperature: f32::NAN, ..good },
        RowParams { temperature: -1.0, ..good },
        RowParams { temperature: f32::INFINITY, ..good },
        RowParams { temperature: 1e-42, ..good },
        RowParams { position: POSITION_MAX + 1, ..good },
        RowParams { draws: 0, ..good },
        RowParams { draws: 5, ..good },
        RowParams { draws: 2, first_draw: u32::MAX - 1, ..good },
        RowParams { logprobs: Some(4), ..good },
        RowParams { logit_bias: &[(300, 1.0)], ..good },
        RowParams { logit_bias: &[(5, 1.0), (5, 2.0)], ..good },
        RowParams { logit_bias: &[(6, 1.0), (5, 2.0)], ..good },
        RowParams { logit_bias: &[(5, f32::NAN)], ..good },
        RowParams { logit_bias: &[(5, f32::INFINITY)], ..good },
        good,
        RowParams { top_k: 5, ..good },
        RowParams { top_p: 0.9, ..good },
        RowParams { top_p: 0.0, ..good },
        RowParams { top_p: f32::NAN, ..good },
        RowParams { min_p: 0.1, ..good },
        RowParams { min_p: 1.5, ..good },
        RowParams { repetition_penalty: 1.1, ..good },
        RowParams { repetition_penalty: 0.0, ..good },
        RowParams { frequency_penalty: 0.5, ..good },
        RowParams { frequency_penalty: f32::NAN, ..good },
        RowParams { presence_penalty: 0.5, ..good },
        RowParams { presence_penalty: f32::INFINITY, ..good },
        RowParams { without_replacement: true, ..good },
        RowParams { temperature: 0.0, draws: 0, ..good },
        RowParams { banned: &[3, 300], ..good },
        RowParams { stop_token_ids: &[300], ..good },
        RowParams { dry_multiplier: -1.0, ..good },
        RowParams { dry_base: 0.5, ..good },
        RowParams { dry_sequence_breakers: &[3, 1], ..good },
        RowParams { top_n_sigma: -1.0, ..good },
        RowParams { top_n_sigma: f32::INFINITY, ..good },
        RowParams { epsilon_cutoff: 1.5, ..good },
        RowParams { typical_p: 0.0, ..good },
        RowParams { xtc_threshold: 0.0, ..good },
        RowParams { xtc_probability: f32::NAN, ..good },
        RowParams { kept: true, temperature: 0.0, ..good },
        RowParams { logprobs: Some(4), logprobs_mode: LogprobsMode::Raw, ..good },
    ];
    rows.extend(one_of_each(good, &history).into_iter().map(|(_, row)| row));
    rows.push(good);
    let last = rows.len() - 1;
    let problem = Problem::gaussian(Size::new(rows.len(), 300, 16), DType::BF16, DType::BF16, 950);
    let out = trial.sample(&problem, PLAN, &rows)?;
    let mut alone = problem.clone();
    alone.hidden = problem.hidden.select(&[last]);
    let want_last = RowBits::of(&trial.sample(&alone, PLAN, &[good])?, 0);
    for (r, row) in rows.iter().enumerate() {
        let want = row.check(&[], &capabilities, &PLAN, 300).err();
        let found = out.row(r).err();
        ensure!(found == want, "row {r}: {found:?} instead of {want:?}");
    }
    ensure!(RowBits::of(&out, last) == want_last, "bad rows change the bits of a good one");
    report.agreed("rows with impossible knobs, and good ones among them", rows.len());
    refused_by_name(trial, report, Knobs::ALL, PLAN)?;
    if capabilities.canonical {
        refused_by_name(trial, report, Knobs::ALL, Plan { canonical: true, ..PLAN })?;
    }

    // The plan has no log-probabilities.
    let plan = Plan { max_logprobs: None, ..PLAN };
    let row = RowParams { logprobs: Some(0), ..good };
    let found = trial.sample(&alone, plan, &[row])?.row(0).err();
    let want = row.check(&[], &capabilities, &plan, 300).err();
    ensure!(found == want && want.is_some(), "unplanned log-probabilities: {found:?} instead of {want:?}");
    report.agreed("unplanned log-probabilities", 1);
    Ok(())
}

pub(super) fn wrong_shapes_are_errors(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = Problem::gaussian(Size::new(5, 300, 16), DType::F32, DType::F32, 951);
    let wide = Problem::gaussian(Size::new(5, 300, 17), DType::F32, DType::F32, 951);
    let mut sampler = trial.sampler(problem.head(), Plan { max_rows: 4, ..Plan::default() })?;
    let shape = sampler.shape();
    ensure!(
        shape.tokens == problem.head().tokens() && shape.vocab_size == 300 && shape.input == 16,
        "the sampler's shape is {shape:?}"
    );
    ensure!(sampler.plan() == Plan { max_rows: 4, ..Plan::default() }, "the plan is {:?}", sampler.plan());
    let rows = [RowParams::default(); 6];
    let mut out = Samples::new();
    sampler.sample(problem.input().row_range(0..4), &rows[..4], &mut out)?;
    let first = RowBits::all(&out);

    // Every call clears its output, including a failed call.
    let mut fill = Samples::new();
    fill.push_error(RowError::NoFiniteLogit);
    out.clone_from(&fill);
    let found = sampler.sample(wide.input().row_range(0..4), &rows[..4], &mut out);
    ensure!(matches!(found, Err(SampleError::Hidden { found: 17, expected: 16 })), "17 columns for 16: {found:?}");
    ensure!(out.is_empty(), "a failed call leaves {} results behind", out.len());
    for params in [0, 3, 5] {
        out.clone_from(&fill);
        let found = sampler.sample(problem.input().row_range(0..4), &rows[..params], &mut out);
        ensure!(
            matches!(found, Err(SampleError::RowCount { rows: 4, params: p }) if p == params),
            "{params} parameters for 4 rows: {found:?}"
        );
        ensure!(out.is_empty(), "a failed call leaves {} results behind", out.len());
    }
    out.clone_from(&fill);
    let found = sampler.sample(problem.input(), &rows[..5], &mut out);
    ensure!(
        matches!(found, Err(SampleError::TooManyRows { rows: 5, max_rows: 4 })),
        "5 rows with a plan for 4: {found:?}"
    );
    ensure!(out.is_empty(), "a failed call leaves {} results behind", out.len());
    out.clone_from(&fill);
    sampler.sample(problem.input().row_range(2..2), &[], &mut out)?;
    ensure!(out.is_empty(), "no rows give {} results", out.len());
    sampler.sample(problem.input().row_range(0..4), &rows[..4], &mut out)?;
    ensure!(RowBits::all(&out) == first, "after failed calls the sampler answers differently");
    report.agreed("calls of wrong shape", 6);

    // `replan`: another number of rows over the same weight.
    match sampler.replan(6) {
        Ok(()) => {
            ensure!(sampler.plan().max_rows == 6, "planned for 6 rows, the plan is {:?}", sampler.plan());
            sampler.sample(problem.input(), &rows[..5], &mut out)?;
            ensure!(RowBits::all(&out)[..4] == first, "planned for more rows the sampler answers differently");
            ensure!(sampler.replan(2).is_ok(), "the sampler takes more rows, but not fewer");
            let found = sampler.sample(problem.input().row_range(0..3), &rows[..3], &mut out);
            ensure!(matches!(found, Err(SampleError::TooManyRows { rows: 3, max_rows: 2 })), "3 rows for 2: {found:?}");
            report.agreed("plans for other numbers of rows", 2);
        }
        Err(SampleError::Unsupported { knob: Knob::MaxRows }) => {
            ensure!(sampler.plan().max_rows == 4, "the sampler has lost its plan");
            report.note("this sampler does not change its number of rows");
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
