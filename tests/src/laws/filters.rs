//! Filters: the kept tokens of a row, and their frequencies.

use crate::laws::knobs::{one_of_each, refused_by_name};
use crate::logits::{LogitShape, softmax, spread, spread_index};
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::statistics::Bins;
use crate::trial::{RowBits, Trial, drawn, rows_of_call};
use flash_sampling_core::{
    DType, History, Knob, Knobs, LogprobsMode, Order, PerturbedArgmax, Plan, RowParams, Samples,
};

const SIZE: Size = Size::new(4, 1003, 40);
const KEPT: Knobs = Knobs::of(&[Knob::Kept]);
const SMALL: &str = "small";
const NEARLY_EQUAL: &str = "nearly equal";
const PLAN: Plan = Plan { max_rows: 4, max_draws: 12, max_logprobs: Some(5), canonical: false };

/// Settings of single filters, and combinations of filters.
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

/// The number of kept tokens, and their bitmap.
type KeptTokens = Option<(u32, Vec<u32>)>;

/// The bits of a row's result, and its kept tokens.
fn outcome(out: &Samples, r: usize) -> Result<(RowBits, KeptTokens), Broken> {
    Ok((RowBits::of(out, r), out.row(r)?.kept.map(|kept| (kept.count, kept.tokens.to_vec()))))
}

pub(super) fn filters_keep_the_references_tokens(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let can = refused_by_name(trial, report, Knobs::FILTERS.union(KEPT), PLAN)?;
    if can.intersection(Knobs::FILTERS).is_empty() {
        return Ok(());
    }
    let (mut rows_compared, kept) = (0, can.contains(Knob::Kept));
    let lists = trial.capabilities()?.without_replacement;
    // Many ties; a few tokens far above the rest; no ties.
    let llm: Vec<f32> = LogitShape::LlmLike.logits(SIZE.vocab, 930).iter().map(|l| (l * 8.0).round() / 8.0).collect();
    let steps =
        |step: f32| LogitShape::Gaussian.logits(SIZE.vocab, 933).into_iter().map(move |l| (l * 4.0).round() * step);
    let small: Vec<f32> = steps(2f32.powi(-17)).collect();
    let nearly_equal: Vec<f32> = steps(2f32.powi(-17)).map(|l| 64.0 + l).collect();
    let problems = [
        ("integers", Problem::integers(SIZE, DType::BF16, DType::BF16, 931)),
        ("LLM-like", Problem::of_logits(&llm, SIZE.rows)),
        ("tail-heavy", Problem::of_logits(&LogitShape::TailHeavy.logits(SIZE.vocab, 932), SIZE.rows)),
        // Logits that deviate by 2^-14 nat. All filters except top-n-sigma see equal probabilities, within rounding.
        (SMALL, Problem::of_logits(&small, SIZE.rows)),
        (NEARLY_EQUAL, Problem::of_logits(&nearly_equal, SIZE.rows)),
    ];
    for (name, problem) in &problems {
        let by_deviation = [SMALL, NEARLY_EQUAL].contains(name);
        let Some(mut reference) = trial.reference(problem.head(), PLAN) else { return Ok(()) };
        let mut sampler = trial.sampler(problem.head(), PLAN)?;
        let (mut out, mut want) = (Samples::new(), Samples::new());
        for order in [Order::Vllm, Order::HuggingFace, Order::LlamaCpp] {
            let base = RowParams { seed: 93, temperature: 0.8, order, ..RowParams::default() };
            for (what, row) in filters(base).into_iter().filter(|(_, row)| row.enabled().without(can).is_empty()) {
                if by_deviation && !what.starts_with("top_n_sigma") {
                    continue;
                }
                // One draw, many draws, a list with its masses, and the kept tokens.
                let rows = [
                    row,
                    RowParams { position: 1, draws: 12, ..row },
                    RowParams { position: 2, draws: 3, logprobs: Some(5), kept, ..row },
                    RowParams { position: 3, draws: 1, without_replacement: lists, kept, ..row },
                ];
                sampler.sample(problem.input(), &rows, &mut out)?;
                reference.sample(problem.input(), &rows, &mut want)?;
                for r in 0..rows.len() {
                    let mass =
                        |out: &Samples| -> Result<_, Broken> { Ok(out.row(r)?.kept.map_or(0.0, |kept| kept.log_mass)) };
                    let (found, expected) = (mass(&out)?, mass(&want)?);
                    let near = (found - expected).abs() < 1e-6;
                    ensure!(near, "{name}, {order:?}, {what}, row {r}: the kept mass is {found}, not {expected}");
                    let (found, want) = (outcome(&out, r)?, outcome(&want, r)?);
                    ensure!(found == want, "{name}, {order:?}, {what}, row {r}: {found:?}, the reference has {want:?}");
                }
                rows_compared += rows.len();
            }
        }
        report.agreed(format!("{name}: rows under filters"), core::mem::take(&mut rows_compared));
    }
    boundaries_are_kept(trial, report, can)
}

/// Edge cases: a mass of exactly p, and equal logits at place k and after it. Filters keep the first few of 4096 equal
/// logits, and the draws include each of them.
fn boundaries_are_kept(trial: &Trial<'_>, report: &mut LawReport, can: Knobs) -> Result<(), Broken> {
    const ROWS: usize = 32;
    let (vocab, base) = (4096, RowParams { seed: 934, draws: 8, ..RowParams::default() });
    let (four, four_of_all) = (RowParams { top_k: 4, ..base }, 4.0 / vocab as f32);
    // The nearest float to 1/17, which is 1 + 2^-28 times as large.
    let (many, above) = (RowParams { top_k: 17, ..base }, 1.0 / 17f32);
    let cases = [
        ("top_k 3", RowParams { top_k: 3, ..base }, 0..3),
        ("a mass of exactly p", RowParams { top_p: four_of_all, ..base }, 0..4),
        ("a mass right below p", RowParams { top_p: four_of_all.next_up(), ..base }, 0..5),
        ("half of four", RowParams { top_p: 0.5, ..four }, 0..2),
        ("more than half of four", RowParams { top_p: 0.5f32.next_up(), ..four }, 0..3),
        ("a probability of the largest", RowParams { min_p: 1.0, ..four }, 0..4),
        ("a probability of exactly epsilon", RowParams { epsilon_cutoff: 0.25, ..four }, 0..4),
        ("probabilities right below epsilon", RowParams { epsilon_cutoff: 0.25f32.next_up(), ..four }, 0..1),
        ("probabilities right above epsilon", RowParams { epsilon_cutoff: above.next_down(), ..many }, 0..17),
        ("probabilities below epsilon by 2^-28 of it", RowParams { epsilon_cutoff: above, ..many }, 0..1),
        ("a typical mass of exactly p", RowParams { typical_p: 0.5, ..four }, 0..2),
        ("top choices", RowParams { xtc_threshold: 0.25, xtc_probability: 1.0, ..four }, 3..4),
        ("no top choices", RowParams { xtc_threshold: 0.25f32.next_up(), xtc_probability: 1.0, ..four }, 0..4),
        ("none by 2^-28 of the limit", RowParams { xtc_threshold: above, xtc_probability: 1.0, ..many }, 0..17),
    ];
    let mut out = Samples::new();
    let mut compared = 0;
    // The mass of the last logit has an error above 2^-27, nearly the largest possible one.
    for (logit, order) in [(1.25, Order::Vllm), (-7.3, Order::HuggingFace), (0.118_005_75, Order::LlamaCpp)] {
        let problem = Problem::of_logits(&vec![logit; vocab], ROWS);
        let mut sampler = trial.sampler(problem.head(), Plan { max_rows: ROWS, ..PLAN })?;
        for (what, row, kept) in &cases {
            if !row.enabled().without(can).is_empty() {
                continue;
            }
            let rows: Vec<_> = (0..ROWS as u64).map(|position| RowParams { position, order, ..*row }).collect();
            sampler.sample(problem.input(), &rows, &mut out)?;
            let mut came = vec![0; vocab];
            for row in out.iter() {
                row?.draws.iter().for_each(|draw| came[draw.token as usize] += 1);
            }
            let are_kept = came.iter().enumerate().all(|(token, &count)| (count > 0) == kept.contains(&token));
            let some: Vec<_> = came.iter().enumerate().filter(|(_, count)| **count > 0).take(9).collect();
            ensure!(are_kept, "{what}, {order:?}: {some:?} came, and all of {kept:?} are kept");
            compared += ROWS * base.draws as usize;
        }
    }
    report.agreed("draws where a filter ends between equal logits", compared);
    Ok(())
}

pub(super) fn filtered_draws_follow_the_truncated_softmax(
    trial: &Trial<'_>,
    report: &mut LawReport,
) -> Result<(), Broken> {
    let can = refused_by_name(trial, report, Knobs::FILTERS, PLAN)?;
    if can.is_empty() {
        return Ok(());
    }
    // Twelve tokens of known probability, `TOKEN_STRIDE` from each other. The kept tokens are counted by hand.
    let p = [0.24, 0.2, 0.16, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.01];
    let logits: Vec<f32> = p.iter().map(|p: &f64| p.ln() as f32).collect();
    let rows = 32;
    let halved: Vec<f32> = logits.iter().map(|l| l * 0.5).collect();
    let problem = Problem::of_logits(&spread(&logits), rows);
    let base = RowParams { temperature: 2.0, ..RowParams::default() };
    // At temperature 2, the probabilities are proportional to the square roots:
    // 0.157 0.143 0.128 0.101 0.091 0.079 0.072 0.064 0.056 0.045 0.032 0.032
    let both = RowParams { min_p: 0.48, top_p: 0.8, ..base };
    let typical = RowParams { top_p: 0.5, typical_p: 0.3, ..base };
    let cases = [
        ("top_k 5", RowParams { top_k: 5, ..base }, 0..5),
        ("top_p 0.5", RowParams { top_p: 0.5, ..base }, 0..4),
        ("top_p 0.8", RowParams { top_p: 0.8, ..base }, 0..8),
        ("min_p 0.48", RowParams { min_p: 0.48, ..base }, 0..6),
        ("epsilon 0.06", RowParams { epsilon_cutoff: 0.06, ..base }, 0..8),
        // The largest logit is 1.07 deviations above the fifth, and 1.34 above the sixth.
        ("top_n_sigma 1.2", RowParams { top_n_sigma: 1.2, ..base }, 0..5),
        // The entropy is 2.368. The nearest surprisals belong to 0.091, 0.101, 0.079 and 0.072, with the sum 0.342.
        ("typical_p 0.3", RowParams { typical_p: 0.3, ..base }, 3..7),
        ("xtc 0.1", RowParams { xtc_threshold: 0.1, xtc_probability: 1.0, ..base }, 3..12),
        ("top_k 8, top_p 0.5 of its mass", RowParams { top_k: 8, top_p: 0.5, ..base }, 0..3),
        ("llama.cpp's order, top_p 0.5", RowParams { top_p: 0.5, order: Order::LlamaCpp, ..base }, 0..3),
        // Min-p first keeps a mass of 0.699, and five tokens have 0.8 of this mass. Top-p first keeps eight tokens, and
        // min-p six of these. Before the temperature, top-p keeps six tokens, and min-p three of these.
        ("vLLM's order, min_p and top_p", both, 0..5),
        ("Hugging Face's order, min_p and top_p", RowParams { order: Order::HuggingFace, ..both }, 0..6),
        ("llama.cpp's order, min_p and top_p", RowParams { order: Order::LlamaCpp, ..both }, 0..3),
        // Of the four tokens that top-p keeps, the third and the second are typical. Before the temperature, the third
        // to the fifth of all tokens are typical, and top-p keeps two of these.
        ("vLLM's order, top_p and typical_p", typical, 1..3),
        ("Hugging Face's order, top_p and typical_p", RowParams { order: Order::HuggingFace, ..typical }, 1..3),
        ("llama.cpp's order, top_p and typical_p", RowParams { order: Order::LlamaCpp, ..typical }, 2..4),
    ];
    let mut sampler = trial.sampler(problem.head(), Plan { max_rows: rows, max_draws: 8, ..Plan::default() })?;
    for (i, (what, row, kept)) in cases.into_iter().enumerate() {
        if !row.enabled().without(can).is_empty() {
            continue;
        }
        let mut law = vec![0.0; p.len()];
        law[kept.clone()].copy_from_slice(&softmax(&halved[kept.clone()]));
        let row = RowParams { seed: 940 + i as u64, draws: 8, ..row };
        let calls = (0..trial.draws(40) as u64).map(|call| rows_of_call(row, call, rows));
        let tokens: Vec<_> = drawn(&mut *sampler, &problem, calls)?.iter().map(|d| spread_index(d.token)).collect();
        ensure!(tokens.iter().all(|t| kept.contains(t)), "{what}: a token came that is not among {kept:?}");
        let outcome = Bins::of(&law, &tokens, p.len(), |t| t).chi_square();
        report.p_value(format!("{what}: tokens, chi-square"), tokens.len(), outcome);
    }
    if can.contains(Knob::XtcThreshold) {
        // A row tosses its coin once. Each row therefore gives one draw, from a mixture of both laws.
        let mut law: Vec<f64> = softmax(&halved).iter().map(|p| 0.25 * p).collect();
        law[3..].iter_mut().zip(softmax(&halved[3..])).for_each(|(law, p)| *law += 0.75 * p);
        let row = RowParams { xtc_threshold: 0.1, xtc_probability: 0.75, seed: 939, ..base };
        let calls = (0..trial.draws(80) as u64).map(|call| rows_of_call(row, call, rows));
        let tokens: Vec<_> = drawn(&mut *sampler, &problem, calls)?.iter().map(|d| spread_index(d.token)).collect();
        let between = tokens.iter().find(|&&t| t >= law.len());
        ensure!(between.is_none(), "xtc: a token came that cannot");
        let outcome = Bins::of(&law, &tokens, law.len(), |t| t).chi_square();
        report.p_value("xtc 0.1 in three of four rows: tokens, chi-square", tokens.len(), outcome);
    }
    Ok(())
}

pub(super) fn disabled_knobs_change_nothing(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = Problem::gaussian(SIZE, DType::BF16, DType::BF16, 960);
    let mut history = History::new(&(0..700).chain(0..300).collect::<Vec<u32>>());
    history.extend([4, 4, 4]);
    let base = RowParams { seed: 96, draws: 12, temperature: 0.9, logprobs: Some(3), ..RowParams::default() };
    let plain = |row: RowParams<'_>| -> Result<Vec<RowBits>, Broken> {
        let rows = [0, 1, 2, 3].map(|position| RowParams { position, ..row });
        Ok(RowBits::all(&trial.sample(&problem, PLAN, &rows)?))
    };
    let want = plain(base)?;
    // Each knob is off, and all its companion knobs are set. `top_k`, `top_p`, `typical_p` and bans are off only at
    // their defaults, as in `base`.
    let past = RowParams { history: Some(&history), ..base };
    let cases = [
        ("order", RowParams { order: Order::LlamaCpp, ..base }),
        ("history", past),
        ("stop_token_ids", RowParams { stop_token_ids: &[1, 2], ..past }),
        ("min_tokens", RowParams { min_tokens: 0, stop_token_ids: &[1, 2], ..base }),
        ("repetition_penalty", RowParams { repetition_penalty: 1.0, ..past }),
        ("frequency_penalty", RowParams { frequency_penalty: -0.0, ..past }),
        ("presence_penalty", RowParams { presence_penalty: -0.0, ..past }),
        ("dry_multiplier", RowParams { dry_multiplier: 0.0, dry_base: 3.0, dry_allowed_length: 1, ..past }),
        ("logit_bias", RowParams { logit_bias: &[(3, 0.0), (900, -0.0)], ..base }),
        ("min_p", RowParams { min_p: -0.0, ..base }),
        ("top_n_sigma", RowParams { top_n_sigma: -0.0, ..base }),
        ("epsilon_cutoff", RowParams { epsilon_cutoff: -0.0, ..base }),
        ("xtc_threshold", RowParams { xtc_threshold: 0.01, ..base }),
        ("xtc_probability", RowParams { xtc_threshold: 0.01, xtc_probability: -0.0, ..base }),
    ];
    let count = cases.len();
    for (what, row) in cases {
        ensure!(plain(row)? == want, "{what} is off, and changes the result");
    }
    report.agreed("draws with knobs that are off, one by one", count * 48);
    let mode = RowParams { logprobs: None, logprobs_mode: LogprobsMode::Raw, ..base };
    ensure!(
        plain(mode)? == plain(RowParams { logprobs: None, ..base })?,
        "logprobs_mode without logprobs has an effect"
    );

    // Filters that are on and keep every token, and a list of all tokens.
    let can = refused_by_name(trial, report, Knobs::FILTERS.union(KEPT), PLAN)?;
    let idle = [
        ("top_k beyond the vocabulary", RowParams { top_k: u32::MAX, ..base }),
        ("min_p 1e-38", RowParams { min_p: 1e-38, ..base }),
        ("top_n_sigma 1e6", RowParams { top_n_sigma: 1e6, ..base }),
        ("epsilon_cutoff 1e-38", RowParams { epsilon_cutoff: 1e-38, ..base }),
        ("kept", RowParams { kept: true, ..base }),
        ("xtc_threshold 1", RowParams { xtc_threshold: 1.0, xtc_probability: 1.0, ..base }),
    ];
    for (what, row) in idle.into_iter().filter(|(_, row)| row.enabled().without(can).is_empty()) {
        ensure!(plain(row)? == want, "{what} keeps every token, and changes the result");
        report.agreed(format!("draws with {what}"), 48);
    }

    let greedy = RowParams { temperature: 0.0, ..base };
    let want = plain(greedy)?;
    // Typical-p and XTC may drop the largest logit, so a greedy row with either is refused.
    let can = can.without(Knobs::of(&[Knob::TypicalP, Knob::XtcThreshold]));
    for (what, row) in filters(greedy).into_iter().filter(|(_, row)| row.enabled().without(can).is_empty()) {
        ensure!(plain(row)? == want, "{what} changes a greedy row");
        report.agreed(format!("greedy draws with {what}"), 48);
    }
    Ok(())
}

pub(super) fn knobs_do_not_reach_other_rows(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = Problem::gaussian(SIZE, DType::BF16, DType::BF16, 961);
    let mut history = History::new(&(0..700).chain(0..300).collect::<Vec<u32>>());
    history.extend([4, 900, 4]);
    let base = RowParams { seed: 97, draws: 12, temperature: 0.9, logprobs: Some(3), ..RowParams::default() };
    let rows = [0, 1, 2, 3].map(|position| RowParams { position, ..base });
    let want = RowBits::all(&trial.sample(&problem, PLAN, &rows)?);
    // One sampler makes all calls, so the test also detects state that a knob leaves behind.
    let mut sampler = trial.sampler(problem.head(), PLAN)?;
    let mut out = Samples::new();
    let can = trial.capabilities()?.knobs;
    for (knob, row) in one_of_each(base, &history) {
        let with = [0, 1, 2, 3].map(|r| RowParams { position: r as u64, ..if r % 2 == 1 { row } else { base } });
        sampler.sample(problem.input(), &with, &mut out)?;
        let same = |r: usize| RowBits::of(&out, r) == want[r];
        ensure!(same(0) && same(2), "{knob} changes rows beside the rows that have it");
        // The compared bits exclude the kept tokens.
        let shows = !(same(1) && same(3)) || (knob == Knob::Kept && can.contains(knob));
        ensure!(shows, "{knob} has no effect, and is not refused");
        sampler.sample(problem.input(), &rows, &mut out)?;
        ensure!(RowBits::all(&out) == want, "{knob} of an earlier call changes a later one");
        report.agreed(format!("rows beside rows with {knob}"), 4);
    }
    Ok(())
}
