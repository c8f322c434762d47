//! Filters and penalties: which tokens a row keeps, and how often each of them comes.

use crate::logits::{LogitShape, softmax};
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::statistics::Bins;
use crate::trial::{RowBits, Trial};
use flash_sampling_core::{DType, History, Knobs, Order, PerturbedArgmax, Plan, RowParams, Samples};

const SIZE: Size = Size::new(4, 1003, 40);
const PLAN: Plan = Plan { max_rows: 4, max_draws: 12, max_logprobs: Some(5), canonical: false };

/// One setting of the filters each, and some together.
fn filters<'a>(row: RowParams<'a>) -> Vec<(&'static str, RowParams<'a>)> {
    vec![
        ("top_k 1", RowParams { top_k: 1, ..row }),
        ("top_k 20", RowParams { top_k: 20, ..row }),
        ("top_k 300", RowParams { top_k: 300, ..row }),
        ("top_k beyond the vocabulary", RowParams { top_k: 5000, ..row }),
        ("top_p 0.3", RowParams { top_p: 0.3, ..row }),
        ("top_p 0.95", RowParams { top_p: 0.95, ..row }),
        ("top_p 0.999", RowParams { top_p: 0.999, ..row }),
        ("min_p 0.05", RowParams { min_p: 0.05, ..row }),
        ("min_p 0.0001", RowParams { min_p: 1e-4, ..row }),
        ("top_n_sigma 1.5", RowParams { top_n_sigma: 1.5, ..row }),
        ("epsilon_cutoff 0.002", RowParams { epsilon_cutoff: 0.002, ..row }),
        ("typical_p 0.6", RowParams { typical_p: 0.6, ..row }),
        ("xtc", RowParams { xtc_threshold: 0.01, xtc_probability: 1.0, ..row }),
        ("top_k 50, top_p 0.9", RowParams { top_k: 50, top_p: 0.9, ..row }),
        ("min_p, top_p", RowParams { min_p: 0.001, top_p: 0.9, ..row }),
        (
            "all",
            RowParams {
                top_n_sigma: 4.0,
                min_p: 1e-3,
                top_k: 400,
                top_p: 0.98,
                typical_p: 0.9,
                epsilon_cutoff: 1e-4,
                xtc_threshold: 0.1,
                xtc_probability: 0.5,
                ..row
            },
        ),
    ]
}

/// The bits of a row's result, and its kept tokens.
fn outcome(out: &Samples, r: usize) -> Result<(RowBits, Option<Vec<u32>>), Broken> {
    Ok((RowBits::of(out, r), out.row(r)?.kept.map(|kept| kept.tokens.to_vec())))
}

/// Whether the sampler does filters; a sampler that does not refuses them by name, which another law checks.
fn supported(trial: &Trial<'_>, report: &mut LawReport) -> Result<bool, Broken> {
    let can = trial.capabilities()?.knobs;
    let all = can.intersection(Knobs::FILTERS) == Knobs::FILTERS;
    if !all {
        report.agreed("filters refused by name", 1);
    }
    Ok(all)
}

pub(super) fn filters_keep_the_references_tokens(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    if !supported(trial, report)? {
        return Ok(());
    }
    let lists = trial.capabilities()?.without_replacement;
    // Many ties; a few tokens far above the rest; no ties.
    let llm: Vec<f32> = LogitShape::LlmLike.logits(SIZE.vocab, 930).iter().map(|l| (l * 8.0).round() / 8.0).collect();
    let problems = [
        ("integers", Problem::integers(SIZE, DType::BF16, DType::BF16, 931)),
        ("LLM-like", Problem::of_logits(&llm, SIZE.rows)),
        ("tail-heavy", Problem::of_logits(&LogitShape::TailHeavy.logits(SIZE.vocab, 932), SIZE.rows)),
    ];
    for (name, problem) in &problems {
        let Some(mut reference) = trial.reference(problem.head(), PLAN) else { return Ok(()) };
        let mut sampler = trial.sampler(problem.head(), PLAN)?;
        let (mut out, mut want) = (Samples::new(), Samples::new());
        for order in [Order::Vllm, Order::HuggingFace, Order::LlamaCpp] {
            let base = RowParams { seed: 93, temperature: 0.8, order, ..RowParams::default() };
            for (what, row) in filters(base) {
                // One draw, many draws, a list with its masses, and the kept tokens.
                let rows = [
                    row,
                    RowParams { position: 1, draws: 12, ..row },
                    RowParams { position: 2, draws: 3, logprobs: Some(5), kept: true, ..row },
                    RowParams { position: 3, draws: 1, without_replacement: lists, kept: true, ..row },
                ];
                sampler.sample(problem.input(), &rows, &mut out)?;
                reference.sample(problem.input(), &rows, &mut want)?;
                for r in 0..rows.len() {
                    let (found, want) = (outcome(&out, r)?, outcome(&want, r)?);
                    ensure!(found == want, "{name}, {order:?}, {what}, row {r}: {found:?}, the reference has {want:?}");
                }
            }
        }
        report.agreed(format!("{name}: draws and kept tokens under filters"), 3 * 16 * 17);
    }
    Ok(())
}

pub(super) fn filtered_draws_follow_the_truncated_softmax(
    trial: &Trial<'_>,
    report: &mut LawReport,
) -> Result<(), Broken> {
    if !supported(trial, report)? {
        return Ok(());
    }
    // Twelve tokens of known probability: what each filter keeps is counted by hand.
    let p = [0.24, 0.2, 0.16, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.01];
    let logits: Vec<f32> = p.iter().map(|p: &f64| p.ln() as f32).collect();
    let rows = 32;
    let problem = Problem::of_logits(&logits, rows);
    let base = RowParams { temperature: 2.0, ..RowParams::default() };
    // At temperature 2 the probabilities are in proportion to the roots:
    // 0.157 0.143 0.128 0.101 0.091 0.079 0.072 0.064 0.056 0.045 0.032 0.032
    let cases = [
        ("top_k 5", RowParams { top_k: 5, ..base }, 5),
        ("top_p 0.5", RowParams { top_p: 0.5, ..base }, 4),
        ("top_p 0.8", RowParams { top_p: 0.8, ..base }, 8),
        ("min_p 0.48", RowParams { min_p: 0.48, ..base }, 6),
        ("epsilon 0.06", RowParams { epsilon_cutoff: 0.06, ..base }, 8),
        ("top_k 8, top_p 0.5 of its mass", RowParams { top_k: 8, top_p: 0.5, ..base }, 3),
        ("llama.cpp's order, top_p 0.5", RowParams { top_p: 0.5, order: Order::LlamaCpp, ..base }, 3),
    ];
    let mut sampler = trial.sampler(problem.head(), Plan { max_rows: rows, max_draws: 8, ..Plan::default() })?;
    let mut out = Samples::new();
    for (i, (what, row, kept)) in cases.into_iter().enumerate() {
        let halved: Vec<f32> = problem.raw_logits(0).iter().map(|l| l * 0.5).collect();
        let mut law = vec![0.0; p.len()];
        law[..kept].copy_from_slice(&softmax(&halved[..kept]));
        let mut tokens = Vec::new();
        for call in 0..trial.draws(40) as u64 {
            let rows: Vec<RowParams<'_>> = (0..rows as u64)
                .map(|r| RowParams { seed: 940 + i as u64, position: call << 8 | r, draws: 8, ..row })
                .collect();
            sampler.sample(problem.input(), &rows, &mut out)?;
            for row in out.iter() {
                tokens.extend(row?.draws.iter().map(|d| d.token as usize));
            }
        }
        ensure!(tokens.iter().all(|&t| t < kept), "{what}: a token came that is not among the {kept} first");
        if let Some(outcome) = Bins::of(&law, &tokens, p.len(), |t| t).chi_square() {
            report.p_value(format!("{what}: tokens, chi-square"), tokens.len(), outcome.statistic, outcome.p);
        }
    }
    Ok(())
}

pub(super) fn penalties_have_the_reference_bits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let can = trial.capabilities()?.knobs;
    if can.intersection(Knobs::ADJUSTMENTS) != Knobs::ADJUSTMENTS {
        report.agreed("penalties refused by name", 1);
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
        ("bans", RowParams { banned: &banned, ..base }),
        ("stops before min_tokens", RowParams { min_tokens: 301, stop_token_ids: &banned, ..base }),
        ("stops after min_tokens", RowParams { min_tokens: 300, stop_token_ids: &banned, ..base }),
        (
            "all",
            RowParams {
                repetition_penalty: 1.2,
                frequency_penalty: 0.5,
                presence_penalty: 0.25,
                banned: &[3, 1, 900],
                logit_bias: &[(0, 1.5), (7, -2.0), (1002, 3.0)],
                ..base
            },
        ),
    ];
    let (mut out, mut want) = (Samples::new(), Samples::new());
    let mut sampler = trial.sampler(problem.head(), PLAN)?;
    let mut plain = None;
    for (what, row) in cases {
        let rows = [0, 1, 2, 3].map(|position| RowParams { position, ..row });
        sampler.sample(problem.input(), &rows, &mut out)?;
        reference.sample(problem.input(), &rows, &mut want)?;
        let (found, want) = (RowBits::all(&out), RowBits::all(&want));
        ensure!(found == want, "{what}: {found:?}, the reference has {want:?}");
        let plain = plain.get_or_insert_with(|| found.clone());
        let idle = matches!(what, "history alone" | "stops after min_tokens");
        ensure!((found == *plain) == idle, "{what}: the knob changes nothing, or changes what it must not");
    }
    report.agreed("draws under penalties and bans", 9 * 48);
    Ok(())
}

pub(super) fn disabled_knobs_change_nothing(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = Problem::gaussian(SIZE, DType::BF16, DType::BF16, 960);
    let history = History::new(&(0..700).collect::<Vec<u32>>());
    let base = RowParams { seed: 96, draws: 12, temperature: 0.9, ..RowParams::default() };
    let plain = |row: RowParams<'_>| -> Result<Vec<RowBits>, Broken> {
        let rows = [0, 1, 2, 3].map(|position| RowParams { position, ..row });
        Ok(RowBits::all(&trial.sample(&problem, PLAN, &rows)?))
    };
    let want = plain(base)?;
    let cases = [
        ("order", RowParams { order: Order::LlamaCpp, ..base }),
        ("history", RowParams { history: Some(&history), ..base }),
        ("stop_token_ids", RowParams { stop_token_ids: &[1, 2], ..base }),
        ("xtc_threshold", RowParams { xtc_threshold: 0.01, ..base }),
        ("logit_bias", RowParams { logit_bias: &[], ..base }),
        ("banned", RowParams { banned: &[], ..base }),
    ];
    for (what, row) in cases {
        ensure!(plain(row)? == want, "{what} is off, and changes the result");
    }
    let greedy = RowParams { temperature: 0.0, ..base };
    let want = plain(greedy)?;
    if supported(trial, report)? {
        for (what, row) in filters(greedy) {
            ensure!(plain(row)? == want, "{what} changes a greedy row");
        }
    }
    report.agreed("draws with knobs that are off", 6 * 48);
    Ok(())
}
