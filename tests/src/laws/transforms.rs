//! The laws of masks, biases, temperature, transforms of the head, and padding.

use crate::data::hash;
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::tensor::Tensor;
use crate::trial::{RowBits, Trial};
use flash_sampling_core::backend::is_allowed;
use flash_sampling_core::{DType, Plan, RowParams};

const SIZE: Size = Size::new(6, 1003, 40);
const PLAN: Plan = Plan { max_rows: 6, max_draws: 8, max_logprobs: Some(4), canonical: false };

fn problem() -> Problem {
    Problem::integers(SIZE, DType::BF16, DType::BF16, 700)
}

fn rows<'a>(change: impl Fn(RowParams<'a>) -> RowParams<'a>) -> Vec<RowParams<'a>> {
    let base = RowParams { seed: 8, draws: 8, logprobs: Some(4), ..RowParams::default() };
    (0..6).map(|r| change(RowParams { position: r, ..base })).collect()
}

fn bits(trial: &Trial<'_>, problem: &Problem, rows: &[RowParams<'_>]) -> Result<Vec<RowBits>, Broken> {
    Ok(RowBits::all(&trial.sample(problem, PLAN, rows)?))
}

fn same_as_reference(trial: &Trial<'_>, what: &str, problem: &Problem, rows: &[RowParams<'_>]) -> Result<(), Broken> {
    let found = trial.sample(problem, PLAN, rows)?;
    trial.expected(problem, PLAN, rows)?.map_or(Ok(()), |want| RowBits::same(&found, &want, what))
}

pub(super) fn masks_forbid_and_allow(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = problem();
    let words = SIZE.vocab.div_ceil(32);
    let plain = bits(trial, &problem, &rows(|row| row))?;
    let full = vec![u32::MAX; words + 3];
    let masked = bits(trial, &problem, &rows(|row| RowParams { mask: Some(&full), ..row }))?;
    ensure!(masked == plain, "a mask that allows everything changes the result");

    let random: Vec<u32> = (0..words as u64).map(|i| (hash(701, i) & hash(702, i)) as u32).collect();
    let mut one = vec![0u32; words];
    one[1002 / 32] = 1 << (1002 % 32);
    let short: Vec<u32> = vec![u32::MAX; 3];
    let masks: [(&str, &[u32]); 4] =
        [("random", &random), ("the last token", &one), ("96 tokens", &short), ("first bit", &[1])];
    for (name, mask) in masks {
        let rows = rows(|row| RowParams { mask: Some(mask), ..row });
        let out = trial.sample(&problem, PLAN, &rows)?;
        for row in out.iter() {
            for d in row?.draws {
                ensure!(is_allowed(mask, d.token), "mask of {name}: token {} came", d.token);
            }
        }
        same_as_reference(trial, name, &problem, &rows)?;
        report.agreed(format!("draws under a mask of {name}"), 48);
    }
    // Each row has its own mask, or none.
    let mut mixed = rows(|row| row);
    for (row, mask) in mixed.iter_mut().zip([Some(&random[..]), None, Some(&one), None, Some(&short), Some(&full)]) {
        row.mask = mask;
    }
    same_as_reference(trial, "a mask per row", &problem, &mixed)?;
    let found = bits(trial, &problem, &mixed)?;
    ensure!(found[1] == plain[1] && found[3] == plain[3], "a neighbour's mask changes a row without one");
    report.agreed("draws under a mask per row", 48);
    Ok(())
}

pub(super) fn logit_bias_shifts_logits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = problem();
    let bias = [(0, 2.0), (3, -1.5), (128, f32::NEG_INFINITY), (640, 4.0), (1002, 3.25)];
    let sparse = rows(|row| RowParams { logit_bias: &bias, ..row });
    let found = bits(trial, &problem, &sparse)?;
    let mut dense = vec![0.0; SIZE.vocab];
    bias.iter().for_each(|&(token, value)| dense[token as usize] = value);
    let with_head_bias = Problem { bias: Some(dense), ..problem.clone() };
    ensure!(
        found == bits(trial, &with_head_bias, &rows(|row| row))?,
        "a sparse logit bias differs from the same bias of the head"
    );
    ensure!(found != bits(trial, &problem, &rows(|row| row))?, "the logit bias changes nothing");
    same_as_reference(trial, "logit bias", &problem, &sparse)?;
    let banned: Vec<(u32, f32)> = (0..1002).map(|t| (t, f32::NEG_INFINITY)).collect();
    let out = trial.sample(&problem, PLAN, &rows(|row| RowParams { logit_bias: &banned, ..row }))?;
    for row in out.iter() {
        ensure!(row?.draws.iter().all(|d| d.token == 1002), "a banned token came");
    }
    let many: Vec<(u32, f32)> = (0..1003).map(|t| (t, (t % 9) as f32 * 0.25)).collect();
    same_as_reference(trial, "a bias on every token", &problem, &rows(|row| RowParams { logit_bias: &many, ..row }))?;
    report.agreed("draws under a sparse bias", 5 * 48);
    Ok(())
}

pub(super) fn temperature_divides_logits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = problem();
    // A temperature of 2 equals a head scale of 1/2, bit for bit.
    let halved = bits(trial, &problem, &rows(|row| RowParams { temperature: 2.0, ..row }))?;
    let scaled = Problem { scale: Some(0.5), ..problem.clone() };
    ensure!(halved == bits(trial, &scaled, &rows(|row| row))?, "temperature 2 differs from a head scale of 1/2");
    for temperature in [0.01, 0.3, 0.7, 1.3, 5.0, 100.0] {
        let rows = rows(|row| RowParams { temperature, ..row });
        same_as_reference(trial, &format!("temperature {temperature}"), &problem, &rows)?;
    }
    report.agreed("draws at 7 temperatures", 7 * 48);

    // A large scale times a large inverse temperature exceeds float32, but zeros stay zeros.
    let zeros = Problem::new(Tensor::from_fn(DType::BF16, 40003, 40, |_, _| 0.0), problem.hidden.clone());
    let scaled = Problem { scale: Some(1e15), ..zeros.clone() };
    let far = bits(trial, &scaled, &rows(|row| RowParams { temperature: 1e-30, ..row }))?;
    ensure!(far == bits(trial, &zeros, &rows(|row| row))?, "zeros over 1e-45 draw otherwise than zeros");
    report.agreed("draws of zeros", 48);

    let greedy = rows(|row| RowParams { temperature: 0.0, ..row });
    let out = trial.sample(&problem, PLAN, &greedy)?;
    for r in 0..6 {
        let logits = problem.raw_logits(r);
        let best = (0..SIZE.vocab).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0);
        for d in out.row(r)?.draws {
            ensure!(
                d.token as usize == best && d.score == logits[best] && d.logit == logits[best],
                "row {r}: greedy gives {d:?}, the argmax is {best} with {}",
                logits[best]
            );
        }
    }
    let other_seed = rows(|row| RowParams { temperature: 0.0, seed: 9, ..row });
    ensure!(bits(trial, &problem, &greedy)? == bits(trial, &problem, &other_seed)?, "a greedy row depends on its seed");
    same_as_reference(trial, "greedy", &problem, &greedy)?;
    report.agreed("greedy draws", 48);
    Ok(())
}

pub(super) fn head_transforms_have_the_reference_bits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let mask: Vec<u32> = (0..32).map(|i| !(1 << i)).collect();
    let bias: Vec<f32> = (0..SIZE.vocab)
        .map(|i| if i % 97 == 5 { f32::NEG_INFINITY } else { (hash(710, i as u64) % 16) as f32 * 0.125 - 1.0 })
        .collect();
    for code in 0..16u32 {
        let on = |bit: u32| code >> bit & 1 == 1;
        let problem = Problem {
            bias: on(0).then(|| bias.clone()),
            soft_cap: on(1).then_some(3.0),
            scale: on(2).then_some(1.7),
            vocab_size: on(3).then_some(997),
            ..problem()
        };
        let rows = rows(|row| RowParams {
            mask: (row.position % 2 == 1).then_some(&mask),
            logit_bias: if row.position % 3 == 1 { &[(4, 1.0), (900, -2.0)] } else { &[] },
            temperature: [1.0, 0.7, 0.0, 1.4, 2.0, 0.25][row.position as usize],
            ..row
        });
        let what = format!("bias {}, soft-cap {}, scale {}, padding {}", on(0), on(1), on(2), on(3));
        same_as_reference(trial, &what, &problem, &rows)?;
    }
    report.agreed("draws under all combinations of head transforms", 16 * 48);
    Ok(())
}

pub(super) fn padding_is_never_drawn(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    for (vocab, padded) in [(1, 2), (5, 64), (1000, 1003), (1000, 1024), (130, 2000)] {
        // Logits are far below 0. Padding of 0 would always win, and padding of NaN would be an error.
        for padding in [0.0, f32::NAN] {
            let weight = Tensor::from_fn(DType::F32, padded, 2, |i, k| match (i < vocab, k) {
                (false, _) => padding,
                (true, 0) => -50.0 - (i % 5) as f32,
                (true, _) => 0.0,
            });
            let hidden = Tensor::from_fn(DType::F32, 6, 2, |_, k| if k == 0 { 1.0 } else { 0.0 });
            let problem = Problem { vocab_size: Some(vocab), ..Problem::new(weight, hidden) };
            let out = trial.sample(&problem, PLAN, &rows(|row| row))?;
            for row in out.iter() {
                let row = row?;
                let top = row.top.iter().map(|&(token, _)| token);
                ensure!(
                    row.draws.iter().map(|d| d.token).chain(top).all(|t| (t as usize) < vocab),
                    "a token beyond {vocab} came"
                );
                ensure!(row.log_z.is_some_and(|z| z < -40.0), "padding is in log Z");
            }
        }
        report.agreed(format!("draws from {vocab} tokens padded to {padded}"), 2 * 48);
    }
    Ok(())
}
