//! The laws of log-probabilities and ranks.

use crate::laws::knobs::refused_by_name;
use crate::logits::LogitShape;
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::trial::{RowBits, Trial};
use flash_sampling_core::backend::MassHistogram;
use flash_sampling_core::reference::log_mass;
use flash_sampling_core::{
    DType, History, Knob, Knobs, LogprobsMode, Order, PerturbedArgmax, Plan, RowError, RowParams, Samples,
};

pub(super) fn log_z_and_top_logprobs_are_right(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let plan = Plan { max_rows: 5, max_draws: 3, max_logprobs: Some(2000), canonical: false };
    let requested = [Some(0), Some(1), Some(20), Some(2000), None];
    let mut worst = 0.0f64;
    for (i, shape) in LogitShape::ALL.into_iter().enumerate() {
        for vocab in [1, 77, 1500] {
            for temperature in [1.0f32, 0.0, 0.7] {
                let problem = Problem::of_logits(&shape.logits(vocab, 800 + i as u64), 5);
                let inverse = if temperature == 0.0 { 1.0 } else { 1.0 / temperature };
                let logits: Vec<f32> = problem.raw_logits(0).iter().map(|l| l * inverse).collect();
                let mut order: Vec<u32> = (0..vocab as u32).collect();
                order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
                let mut mass = MassHistogram::default();
                mass.extend_from_slice(&logits);
                let rows: Vec<RowParams<'_>> = requested
                    .iter()
                    .map(|&logprobs| RowParams { seed: 80, temperature, draws: 3, logprobs, ..RowParams::default() })
                    .collect();
                let out = trial.sample(&problem, plan, &rows)?;
                let where_ = || format!("{shape:?}, {vocab} tokens, temperature {temperature}");
                for (r, requested) in requested.into_iter().enumerate() {
                    let row = out.row(r)?;
                    let Some(requested) = requested else {
                        let nothing = row.log_z.is_none() && row.top.is_empty() && out.mass(r).is_none();
                        ensure!(nothing, "{}: log-probabilities without a request", where_());
                        continue;
                    };
                    let log_z = row.log_z.ok_or_else(|| Broken(format!("{}: no log Z", where_())))?;
                    worst = worst.max((log_z - log_mass(&logits)).abs());
                    ensure!(
                        log_z.to_bits() == mass.log_z().to_bits(),
                        "{}: log Z is {log_z}, the mass histogram's is {}",
                        where_(),
                        mass.log_z()
                    );
                    ensure!(out.mass(r).is_none_or(|found| *found == mass), "{}: the masses differ", where_());
                    let want = &order[..(requested as usize).min(vocab)];
                    let top: Vec<u32> = row.top.iter().map(|&(token, _)| token).collect();
                    ensure!(top == want, "{}: the top {requested} are {top:?}, not {want:?}", where_());
                    for &(token, logit) in row.top {
                        ensure!(logit == logits[token as usize], "{}: a top logit is off", where_());
                    }
                    for d in row.draws {
                        let exact = f64::from(logits[d.token as usize]) - log_mass(&logits);
                        let found = row.log_prob(d.logit).unwrap_or(f64::NAN);
                        ensure!(
                            (f64::NEG_INFINITY..=0.0).contains(&found),
                            "{}: a log-probability of {found}",
                            where_()
                        );
                        worst = worst.max((found - exact).abs());
                    }
                }
            }
        }
        (trial.progress)((i + 1) as f64 / 5.0);
    }
    report.agreed("top lists and log Z bits", 5 * 3 * 3 * 4);
    report.at_most("largest error of a log-probability, in nats", 5 * 3 * 3 * 4, worst, 2e-8);
    Ok(())
}

pub(super) fn raw_logprobs_are_the_models_own(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let size = Size::new(8, 1003, 40);
    let plan = Plan { max_rows: 8, max_draws: 5, max_logprobs: Some(6), canonical: false };
    if refused_by_name(trial, report, Knobs::of(&[Knob::LogprobsMode]), plan)?.is_empty() {
        return Ok(());
    }
    let can = trial.capabilities()?;
    let mut problem = Problem::integers(size, DType::BF16, DType::BF16, 980);
    // Transforms of the head are part of the raw logits.
    problem.soft_cap = Some(4.0);
    problem.bias = Some((0..size.vocab).map(|t| if t % 50 == 7 { f32::NEG_INFINITY } else { 0.125 }).collect());
    let history = History::new(&(0..500).collect::<Vec<u32>>());
    let base = RowParams { seed: 98, draws: 5, logprobs: Some(6), ..RowParams::default() };
    let mut rows = [
        base,
        RowParams { temperature: 0.5, ..base },
        RowParams { temperature: 0.0, logprobs: Some(0), ..base },
        RowParams { logit_bias: &[(1, 30.0), (2, f32::NEG_INFINITY)], ..base },
        RowParams { mask: Some(&[0x1234_5678; 9]), ..base },
        RowParams { without_replacement: can.without_replacement, ..base },
        RowParams { repetition_penalty: 1.5, banned: &[3, 4], history: Some(&history), ..base },
        RowParams { top_k: 20, top_p: 0.7, temperature: 1.5, logprobs: Some(2), ..base },
    ];
    for (row, position) in rows.iter_mut().zip(0..) {
        let supported = row.enabled().without(can.knobs).is_empty();
        *row = RowParams { position, ..if supported { *row } else { base } };
    }
    let raw = rows.map(|row| RowParams { logprobs_mode: LogprobsMode::Raw, ..row });
    let mut sampler = trial.sampler(problem.head(), plan)?;
    let (mut plain, mut out) = (Samples::new(), Samples::new());
    sampler.sample(problem.input(), &rows, &mut plain)?;
    sampler.sample(problem.input(), &raw, &mut out)?;
    let mut worst = 0.0f64;
    for (r, params) in raw.iter().enumerate() {
        let logits = problem.raw_logits(r);
        let row = out.row(r)?;
        ensure!(row.draws == plain.row(r)?.draws, "row {r}: raw log-probabilities change the draws");
        let mut mass = MassHistogram::default();
        mass.extend_from_slice(&logits);
        let log_z = row.log_z.map(f64::to_bits);
        ensure!(log_z == Some(mass.log_z().to_bits()), "row {r}: log Z is {:?}", row.log_z);
        ensure!(out.mass(r).is_none_or(|found| *found == mass), "row {r}: the masses differ");
        let mut order: Vec<u32> = (0..size.vocab as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        order.truncate(params.logprobs.unwrap_or(0) as usize);
        let top: Vec<u32> = row.top.iter().map(|&(token, _)| token).collect();
        ensure!(top == order, "row {r}: the largest raw logits are of {top:?}, not {order:?}");
        ensure!(row.top.iter().all(|&(token, logit)| logit == logits[token as usize]), "row {r}: a top logit is off");
        ensure!(row.raw_logits.len() == row.draws.len(), "row {r}: {} raw logits", row.raw_logits.len());
        for (i, d) in row.draws.iter().enumerate() {
            ensure!(row.raw_logits[i] == logits[d.token as usize], "row {r}, draw {i}: the raw logit is off");
            let exact = f64::from(logits[d.token as usize]) - log_mass(&logits);
            worst = worst.max((row.draw_log_prob(i).unwrap_or(f64::NAN) - exact).abs());
        }
    }
    report.agreed("rows with raw log-probabilities", raw.len());
    report.at_most("largest error of a raw log-probability, in nats", raw.len() * 5, worst, 2e-8);
    if let Some(want) = trial.expected(&problem, plan, &raw)? {
        RowBits::same(&out, &want, "raw log-probabilities")?;
    }
    // On real inputs, the raw logits equal the transformed logits of a row without transforms.
    let problem = Problem::gaussian(size, DType::BF16, DType::F32, 981);
    let bare = [0, 1, 2, 3, 4, 5, 6, 7].map(|position| RowParams { position, ..base });
    let mut sampler = trial.sampler(problem.head(), plan)?;
    sampler.sample(problem.input(), &bare, &mut plain)?;
    sampler.sample(problem.input(), &raw, &mut out)?;
    for r in 0..raw.len() {
        let (row, bare) = (out.row(r)?, plain.row(r)?);
        ensure!(row.log_z == bare.log_z, "row {r}: log Z {:?}, without transforms {:?}", row.log_z, bare.log_z);
        let shared = row.top.iter().zip(bare.top).all(|(a, b)| a == b);
        ensure!(shared, "row {r}: the largest raw logits are not those without transforms");
    }
    let same = out.row(0)?;
    ensure!(same.raw_logits.iter().zip(same.draws).all(|(raw, d)| *raw == d.logit), "a raw logit has other bits");
    report.agreed("raw logits of real inputs", raw.len());
    Ok(())
}

pub(super) fn ranks_and_given_tokens_are_right(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let size = Size::new(10, 1003, 40);
    let plan = Plan { max_rows: 10, max_draws: 5, max_logprobs: Some(6), canonical: false };
    let wanted = Knobs::of(&[Knob::LogprobTokenIds, Knob::Ranks]);
    if refused_by_name(trial, report, wanted, plan)? != wanted {
        return Ok(());
    }
    let can = trial.capabilities()?;
    // Logits are small integers, so most of them tie.
    let mut problem = Problem::integers(size, DType::BF16, DType::BF16, 982);
    problem.bias = Some((0..size.vocab).map(|t| if t % 50 == 7 { f32::NEG_INFINITY } else { 0.125 }).collect());
    let history = History::new(&(0..500).collect::<Vec<u32>>());
    let base = RowParams { seed: 99, draws: 5, logprobs: Some(6), ..RowParams::default() };
    let mut plain = [
        base,
        RowParams { temperature: 8.0, logprobs: Some(0), ..base },
        RowParams { temperature: 0.0, logprobs: Some(0), ..base },
        RowParams { logit_bias: &[(1, 30.0), (2, f32::NEG_INFINITY)], ..base },
        RowParams { mask: Some(&[0x1234_5678; 9]), temperature: 3.0, ..base },
        RowParams { without_replacement: can.without_replacement, temperature: 5.0, logprobs: Some(1), ..base },
        RowParams { repetition_penalty: 1.5, banned: &[3, 4], history: Some(&history), temperature: 2.0, ..base },
        RowParams { top_k: 200, temperature: 9.0, logprobs: Some(2), ..base },
        RowParams { top_p: 0.9, min_p: 0.01, temperature: 1e3, order: Order::LlamaCpp, logprobs: Some(2), ..base },
        RowParams { xtc_threshold: 0.001, xtc_probability: 1.0, temperature: 4.0, logprobs: Some(1), ..base },
    ];
    for (row, position) in plain.iter_mut().zip(0..) {
        let supported = row.enabled().without(can.knobs).is_empty();
        *row = RowParams { position, ..if supported { *row } else { base } };
    }
    let given = [2, 7, 1002, 1, 500, 1];
    let modes = [LogprobsMode::Processed, LogprobsMode::Raw];
    for mode in
        modes.into_iter().filter(|mode| *mode == LogprobsMode::Processed || can.knobs.contains(Knob::LogprobsMode))
    {
        let rows = plain.map(|row| RowParams { logprobs_mode: mode, ..row });
        let requests = rows.map(|row| RowParams { ranks: true, logprob_token_ids: &given, ..row });
        let mut sampler = trial.sampler(problem.head(), plan)?;
        let (mut without, mut out) = (Samples::new(), Samples::new());
        sampler.sample(problem.input(), &rows, &mut without)?;
        sampler.sample(problem.input(), &requests, &mut out)?;
        let mut beyond = 0;
        for r in 0..rows.len() {
            let (row, without) = (out.row(r)?, without.row(r)?);
            ensure!(row.draws == without.draws && row.log_z == without.log_z, "row {r}: ranks change the draws");
            ensure!(without.ranks.is_empty() && without.token_logits.is_empty(), "row {r}: ranks without a request");
            let tokens: Vec<u32> = row.token_log_probs().map(|(token, _)| token).collect();
            ensure!(tokens == given, "row {r}: log-probabilities of {tokens:?}, not of {given:?}");
            ensure!(row.ranks.len() == row.draws.len(), "row {r}: {} ranks", row.ranks.len());
            for (&(token, _), rank) in row.top.iter().zip(1..) {
                let drawn = row.draws.iter().zip(row.ranks).filter(|(d, _)| d.token == token);
                ensure!(drawn.clone().all(|(_, found)| *found == rank), "row {r}: rank of listed token {token}");
            }
            beyond += row.ranks.iter().filter(|rank| **rank as usize > row.top.len()).count();
            if mode == LogprobsMode::Raw {
                let logits = problem.raw_logits(r);
                let logit = |token: u32| logits[token as usize];
                ensure!(row.token_logits.iter().all(|&(t, l)| l == logit(t)), "row {r}: {:?}", row.token_logits);
                for (d, &found) in row.draws.iter().zip(row.ranks) {
                    let before = |&t: &u32| logit(t) > logit(d.token) || (logit(t) == logit(d.token) && t < d.token);
                    let rank = 1 + (0..size.vocab as u32).filter(before).count() as u32;
                    ensure!(found == rank, "row {r}: token {} has rank {found}, not {rank}", d.token);
                }
            }
        }
        ensure!(beyond > 5, "only {beyond} ranks beyond the lists");
        if let Some(want) = trial.expected(&problem, plan, &requests)? {
            RowBits::same(&out, &want, format!("{mode:?}"))?;
        }
        report.agreed(format!("{mode:?}: rows with ranks and given tokens"), rows.len());
    }
    // A token outside the vocabulary.
    let vocab_size = size.vocab as u32;
    let unknown = RowParams { logprob_token_ids: &[5, 1003], ..base };
    let out = trial.sample(
        &problem,
        plan,
        &[base, unknown, RowParams { ranks: true, logprobs: None, ..base }, base, base, base, base, base, base, base],
    )?;
    let named = RowError::UnknownToken { knob: Knob::LogprobTokenIds, token: 1003, vocab_size };
    let needs = RowError::Invalid { knob: Knob::Ranks, reason: "needs logprobs" };
    ensure!(out.row(0).is_ok() && out.row(3).is_ok(), "an error of a row reaches its neighbours");
    ensure!(
        out.row(1).err() == Some(named) && out.row(2).err() == Some(needs),
        "{:?}, {:?}",
        out.row(1).err(),
        out.row(2).err()
    );
    report.agreed("bad tokens refused", 2);
    Ok(())
}
