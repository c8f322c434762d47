//! The laws of shapes, layouts and ties.

use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::tensor::Tensor;
use crate::trial::{RowBits, Trial};
use core::fmt::Display;
use flash_sampling_core::{DType, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};

fn rows(count: usize) -> Vec<RowParams<'static>> {
    (0..count).map(|r| RowParams { seed: 3, position: r as u64, ..RowParams::default() }).collect()
}

pub(super) fn every_shape_is_taken(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let sizes = [
        Size::new(1, 1, 1),
        Size::new(4, 1, 130),
        Size::new(1, 2, 3),
        Size::new(3, 3, 1),
        Size::new(2, 5, 7),
        Size::new(1, 63, 8),
        Size::new(1, 64, 64),
        Size::new(5, 65, 31),
        Size::new(2, 129, 512),
        Size::new(256, 40, 17),
        Size::new(17, 1000, 1023),
        Size::new(130, 515, 66),
        Size::new(3, 33, 8192),
        Size::new(2, 32_000, 24),
        Size::new(1, 151_936, 8),
        Size::new(2, 262_147, 1),
    ];
    for (i, size) in sizes.into_iter().enumerate() {
        let (weight, hidden) = crate::trial::DTYPES[i % 2];
        let problem = Problem::integers(size, weight, hidden, 70 + i as u64);
        let plan = Plan { max_rows: size.rows, ..Plan::default() };
        let rows = rows(size.rows);
        let found = trial.sample(&problem, plan, &rows)?;
        compare(trial, format!("{size:?}"), &problem, &found)?;
        (trial.progress)((i + 1) as f64 / sizes.len() as f64);
    }
    report.agreed("shapes", sizes.len());

    // Unaligned addresses, and gaps of NaN between rows.
    for (weight, hidden) in crate::trial::DTYPES {
        let problem = Problem::integers(Size::new(6, 301, 45), weight, hidden, 90);
        let (weight_bytes, weight_stride) = problem.weight.strided(1, 3);
        let (hidden_bytes, hidden_stride) = problem.hidden.strided(3, 5);
        let strided_weight = Matrix::from_bytes(&weight_bytes[1..], weight, 301, 45, weight_stride)?;
        let strided_hidden = Matrix::from_bytes(&hidden_bytes[3..], hidden, 6, 45, hidden_stride)?;
        let head = Head::new(strided_weight)?;
        let mut found = Samples::new();
        let plan = Plan { max_rows: 6, ..Plan::default() };
        trial.sampler(head, plan)?.sample(strided_hidden, &rows(6), &mut found)?;
        compare(trial, format!("strided {} x {}", weight.name(), hidden.name()), &problem, &found)?;
    }
    report.agreed("strided and unaligned layouts", crate::trial::DTYPES.len());
    Ok(())
}

/// Compares results with the reference. Without a reference, checks that every row has a valid token.
fn compare(trial: &Trial<'_>, what: impl Display, problem: &Problem, found: &Samples) -> Result<(), Broken> {
    let rows = rows(problem.rows());
    let plan = Plan { max_rows: rows.len(), ..Plan::default() };
    if let Some(want) = trial.expected(problem, plan, &rows)? {
        return RowBits::same(found, &want, what);
    }
    for row in found.iter() {
        ensure!(row?.token() < problem.head().vocab_size(), "{what}: a token beyond the vocabulary");
    }
    Ok(())
}

pub(super) fn ties_go_to_the_lower_token(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let plan = Plan { max_rows: 8, ..Plan::default() };
    let greedy = RowParams { temperature: 0.0, ..RowParams::default() };
    for (vocab, best) in [(1000, vec![0]), (1000, vec![999]), (1003, vec![129, 130, 640]), (517, vec![3, 516])] {
        let logits: Vec<f32> = (0..vocab).map(|i| if best.contains(&i) { 2.0 } else { 1.0 }).collect();
        let out = trial.sample(&Problem::of_logits(&logits, 8), plan, &[greedy; 8])?;
        for row in out.iter() {
            let token = row?.token() as usize;
            ensure!(token == best[0], "greedy over ties {best:?} of {vocab} gives {token}");
        }
    }
    let out = trial.sample(&Problem::of_logits(&[0.5; 333], 8), plan, &[greedy; 8])?;
    for row in out.iter() {
        ensure!(row?.token() == 0, "greedy over a flat row does not give token 0");
    }
    report.agreed("greedy ties", 40);

    // At 2^27, float32 values are 16 apart, so perturbed scores have only a few values.
    let vocab = 20_011;
    let weight = Tensor::from_fn(DType::F32, vocab, 1, |_, _| 2f32.powi(27));
    let problem = Problem::new(weight, Tensor::from_fn(DType::F32, 8, 1, |_, _| 1.0));
    let out = trial.sample(&problem, plan, &rows(8))?;
    compare(trial, "perturbed ties", &problem, &out)?;
    report.agreed("perturbed ties", 8);
    Ok(())
}
