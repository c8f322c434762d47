//! The laws of the noise of single tokens. With a head of zeros, the score of a token is its noise.

use crate::problem::Problem;
use crate::report::{Broken, LawReport, ensure};
use crate::tensor::Tensor;
use crate::trial::Trial;
use crate::vectors;
use flash_sampling_core::noise::POSITION_MAX;
use flash_sampling_core::{DType, Domain, Noise, PerturbedArgmax, Plan, RowParams, Samples};

const ROWS: usize = 64;

/// The key of the noise of a token: (seed, position, draw, token).
#[derive(Clone, Copy)]
struct Probe {
    seed: u64,
    position: u64,
    draw: u32,
    token: u32,
}

/// Reads the noise of a sampler from rows that allow one token each, for `draws` draws per probe.
fn scores(
    sampler: &mut dyn PerturbedArgmax,
    problem: &Problem,
    probes: &[Probe],
    draws: u32,
) -> Result<Vec<f32>, Broken> {
    let vocab = problem.weight.rows();
    let mut found = Vec::new();
    let mut out = Samples::new();
    for chunk in probes.chunks(ROWS) {
        let masks: Vec<Vec<u32>> = chunk
            .iter()
            .map(|p| {
                let mut mask = vec![0u32; vocab.div_ceil(32)];
                mask[p.token as usize / 32] |= 1 << (p.token % 32);
                mask
            })
            .collect();
        let rows: Vec<RowParams<'_>> = chunk
            .iter()
            .zip(&masks)
            .map(|(p, mask)| RowParams {
                seed: p.seed,
                position: p.position,
                first_draw: p.draw,
                draws,
                mask: Some(mask),
                ..RowParams::default()
            })
            .collect();
        sampler.sample(problem.input().row_range(0..chunk.len()), &rows, &mut out)?;
        for (row, probe) in out.iter().zip(chunk) {
            let row = row.map_err(|e| Broken(format!("only token {} of {vocab} is allowed: {e}", probe.token)))?;
            for draw in row.draws {
                ensure!(draw.token == probe.token, "token {} came, only {} is allowed", draw.token, probe.token);
                found.push(draw.score);
            }
        }
    }
    Ok(found)
}

fn zeros(vocab: usize) -> Problem {
    Problem::new(
        Tensor::from_fn(DType::BF16, vocab, 5, |_, _| 0.0),
        Tensor::from_fn(DType::BF16, ROWS, 5, |r, k| (r + k) as f32),
    )
}

/// Checks all tokens of two odd vocabularies and corner cases of a large one. Seeds, positions and draws use every
/// field of the counter.
pub(super) fn noise_has_the_reference_bits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let fields = [(0, 0, 0), (1, 7, 1), (1 << 63 | 5, 1 << 40, u32::MAX - 9), (u64::MAX, POSITION_MAX, 1 << 31)];
    let large = 262_147u32;
    let corners = [0, 1, 2, 3, 4, 127, 128, 131_071, 131_072, large - 5, large - 4, large - 3, large - 2, large - 1];
    for (vocab, tokens) in [(3, vec![0, 1, 2]), (1027, (0..1027).collect()), (large, corners.to_vec())] {
        let problem = zeros(vocab as usize);
        let plan = Plan { max_rows: ROWS, max_draws: 2, ..Plan::default() };
        let mut sampler = trial.sampler(problem.head(), plan)?;
        let probes: Vec<Probe> = fields
            .iter()
            .flat_map(|&(seed, position, draw)| tokens.iter().map(move |&token| Probe { seed, position, draw, token }))
            .collect();
        let found = scores(sampler.as_mut(), &problem, &probes, 2)?;
        for (probe, pair) in probes.iter().zip(found.chunks(2)) {
            let noise = Noise::new(probe.seed, probe.position).ok_or(Broken("the position is valid".into()))?;
            for (draw, &score) in (probe.draw..).zip(pair) {
                let Probe { seed, position, token, .. } = *probe;
                let want = noise.gumbel(Domain::Token, draw, token);
                ensure!(
                    score.to_bits() == want.to_bits(),
                    "noise of seed {seed}, position {position}, draw {draw}, token {token} is {score}, not {want}"
                );
            }
        }
        report.agreed(format!("noise bits, vocabulary {vocab}"), found.len());
    }
    Ok(())
}

/// Checks the rarest words with their refinement, through the sampler.
pub(super) fn noise_matches_the_vectors(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let lines: Vec<Vec<u64>> =
        vectors::lines(vectors::NOISE).map(|fields| fields.into_iter().map(vectors::number).collect()).collect();
    let probes: Vec<Probe> =
        lines.iter().map(|f| Probe { seed: f[0], position: f[1], draw: f[2] as u32, token: f[3] as u32 }).collect();
    let problem = zeros(4096);
    let mut sampler = trial.sampler(problem.head(), Plan { max_rows: ROWS, ..Plan::default() })?;
    let found = scores(sampler.as_mut(), &problem, &probes, 1)?;
    for (fields, score) in lines.iter().zip(&found) {
        ensure!(
            u64::from(score.to_bits()) == fields[4],
            "seed, position, draw, token {:?}: noise bits {:#010x}, not {:#010x}",
            &fields[..4],
            score.to_bits(),
            fields[4]
        );
    }
    report.agreed("noise bits of vectors/noise.txt", found.len());
    Ok(())
}
