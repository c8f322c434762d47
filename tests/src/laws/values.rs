//! The law of value stability: a seed gives the same tokens in every release.

use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::trial::Trial;
use crate::vectors;
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{DType, Plan, RowParams};

/// Returns the problem of `vectors/value_stability.txt`. Line `i` of a scheme draws from row `i mod 8`.
pub fn stability_problem() -> Problem {
    Problem::integers(Size::new(8, 5003, 32), DType::BF16, DType::BF16, 2026)
}

/// Returns the schemes of the file.
pub fn stability_schemes() -> [ReferenceVariant; 4] {
    [
        ReferenceVariant::Tiled,
        ReferenceVariant::Grouped(512),
        ReferenceVariant::Online(512),
        ReferenceVariant::Sharded(uneven_starts(0, 5003)),
    ]
}

/// Returns the starts of four unequal and unaligned shards of `start .. end`, one of them empty. The suite's sharded
/// samplers use this split.
pub fn uneven_starts(start: u32, end: u32) -> Vec<u32> {
    let size = end - start;
    [0, size / 3, size / 3, size - size / 5].map(|at| start + at).to_vec()
}

/// Returns the name of a scheme in the file.
pub fn scheme_name(scheme: &ReferenceVariant) -> String {
    match scheme {
        ReferenceVariant::Tiled => "tiled".into(),
        ReferenceVariant::Grouped(size) => format!("grouped/{size}"),
        ReferenceVariant::Online(size) => format!("online/{size}"),
        ReferenceVariant::Sharded(starts) => {
            let starts: Vec<String> = starts.iter().map(u32::to_string).collect();
            format!("sharded/{}", starts.join(","))
        }
    }
}

pub(super) fn values_are_stable(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = stability_problem();
    let Some(scheme) = trial.factory.reference_variant(&problem.head()) else {
        report.note("this factorisation has no lines in vectors/value_stability.txt");
        return Ok(());
    };
    let scheme = scheme_name(&scheme);
    let lines: Vec<Vec<u64>> = vectors::lines(vectors::VALUE_STABILITY)
        .filter(|fields| fields[0] == scheme)
        .map(|fields| fields[1..].iter().map(|f| vectors::number(f)).collect())
        .collect();
    if lines.is_empty() {
        report.note(format!("{scheme} has no lines in vectors/value_stability.txt"));
    }
    for chunk in lines.chunks(8) {
        let rows: Vec<RowParams<'_>> = chunk
            .iter()
            .map(|f| RowParams { seed: f[0], position: f[1], first_draw: f[2] as u32, ..RowParams::default() })
            .collect();
        let used: Vec<usize> = (0..chunk.len()).collect();
        let part = Problem { hidden: problem.hidden.select(&used), ..problem.clone() };
        let out = trial.sample(&part, Plan { max_rows: 8, ..Plan::default() }, &rows)?;
        for (row, fields) in out.iter().zip(chunk) {
            let token = row?.token();
            ensure!(
                u64::from(token) == fields[3],
                "{scheme}, seed, position, draw {:?}: token {token}, not {}",
                &fields[..3],
                fields[3]
            );
        }
    }
    report.agreed(format!("tokens of {scheme} in vectors/value_stability.txt"), lines.len());
    Ok(())
}
