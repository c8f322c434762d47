//! The law of partitions: a vocabulary may be split at any token.

use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::trial::Trial;
use flash_sampling_core::backend::{MassHistogram, Winner};
use flash_sampling_core::{DType, Exactness, Head, Plan, RowError, RowParams, SampleError, Samples};

const PLAN: Plan = Plan { max_rows: 6, max_draws: 4, max_logprobs: Some(3), canonical: false };

/// Returns two rows each of plain draws, greedy draws, and draws with all row transforms.
fn rows(mask: &[u32]) -> [RowParams<'_>; 6] {
    let drawn = RowParams { seed: 11, position: 3, draws: 4, logprobs: Some(3), ..RowParams::default() };
    let greedy = RowParams { temperature: 0.0, ..drawn };
    let all = RowParams { mask: Some(mask), logit_bias: &[(5, 1.5), (700, -2.0)], temperature: 0.7, ..drawn };
    [drawn, RowParams { seed: 12, ..drawn }, greedy, greedy, all, RowParams { position: 4, ..all }]
}

/// What a shard contributes to a row.
#[derive(Clone)]
struct Share {
    /// The winner of each draw.
    winners: Vec<Winner>,
    log_z: f64,
    /// The masses of log Z, if the sampler returns them.
    mass: Option<MassHistogram>,
}

/// `None`: the shard has no token that can be drawn.
type Part = Option<Share>;

/// The largest error of a log Z that is the sum of the shards' log Z, in nats. Merged masses have no error.
const LOG_Z_ERROR: f64 = 1e-7;

fn parts(trial: &Trial<'_>, head: Head<'_>, problem: &Problem, rows: &[RowParams<'_>]) -> Result<Vec<Part>, Broken> {
    let (mut out, mut sampler) = (Samples::new(), trial.sampler(head, PLAN)?);
    let has_scan = sampler.scan().is_some();
    match sampler.sample(problem.input(), rows, &mut out) {
        Ok(()) => {}
        Err(e @ SampleError::Backend { .. }) => return Err(Broken(format!("shard {:?}: {e}", head.tokens()))),
        Err(e) => return Err(e.into()),
    }
    (0..out.len())
        .map(|r| match out.row(r) {
            Ok(row) => {
                let winners = row.draws.iter().map(|d| Winner::new(d.score, d.token)).collect();
                let missing = || Broken("log-probabilities were requested, but there is no log Z".into());
                let mass = out.mass(r).cloned();
                ensure!(mass.is_some() || !has_scan, "row {r} has no masses, and the sampler has a scan");
                Ok(Some(Share { winners, log_z: row.log_z.ok_or_else(missing)?, mass }))
            }
            Err(RowError::NoFiniteLogit) => Ok(None),
            Err(e) => Err(Broken(format!("shard {:?}: {e}", head.tokens()))),
        })
        .collect()
}

fn merge(a: Part, b: Part) -> Part {
    match (a, b) {
        (Some(mut a), Some(b)) => {
            a.winners.iter_mut().zip(b.winners).for_each(|(w, o)| *w = w.merge(o));
            a.mass = a.mass.zip(b.mass).map(|(mut mass, other)| {
                mass.merge(&other);
                mass
            });
            let sum = || a.log_z.max(b.log_z) + (-(a.log_z - b.log_z).abs()).exp().ln_1p();
            a.log_z = a.mass.as_ref().map_or_else(sum, MassHistogram::log_z);
            Some(a)
        }
        (a, b) => a.or(b),
    }
}

/// Merges left to right, right to left, and as a tree.
fn merge_orders(parts: &[Part]) -> [Part; 3] {
    let mut tree = parts.to_vec();
    while tree.len() > 1 {
        tree = tree.chunks(2).map(|pair| pair.iter().cloned().fold(None, merge)).collect();
    }
    [parts.iter().cloned().fold(None, merge), parts.iter().rev().cloned().fold(None, merge), tree.pop().flatten()]
}

pub(super) fn partitions_merge_to_the_same_winner(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    if !trial.factory.takes_shards() {
        report.note("this sampler covers whole vocabularies only");
        return Ok(());
    }
    let pathwise = trial.capabilities()?.exactness == Exactness::Pathwise;
    if !pathwise {
        report.note("this variant is exact in distribution: partitions are compared for greedy rows and log Z only");
    }
    let vocab = 1543u32;
    let size = Size::new(6, vocab as usize, 96);
    let fine: Vec<u32> = (0..vocab).step_by(101).collect();
    let splits: [&[u32]; 6] = [
        &[0, 1],
        &[0, vocab - 1],
        &[0, 0, 700, 700, 701, vocab],
        &[0, 128, 256, 1024],
        &[0, 3, 6, 9, 13, 18, 1111],
        &fine,
    ];
    let problems = [
        ("integers", Problem::integers(size, DType::BF16, DType::BF16, 5)),
        ("real bf16", Problem::gaussian(size, DType::BF16, DType::BF16, 6)),
        ("real f32", Problem::gaussian(size, DType::F32, DType::F32, 7)),
    ];
    let mask: Vec<u32> = (0..49).map(|i| 0xffff_0f0fu32.rotate_left(i)).collect();
    for (i, (name, problem)) in problems.iter().enumerate() {
        let rows = rows(&mask);
        let whole = parts(trial, problem.head(), problem, &rows)?;
        if i == 0 && whole.iter().flatten().any(|whole| whole.mass.is_none()) {
            report.note("this sampler returns log Z without masses: log Z of partitions is compared to 1e-7 nats");
        }
        for starts in splits {
            let shards: Vec<Vec<Part>> = problem
                .head()
                .split(starts)
                .into_iter()
                .map(|head| parts(trial, head, problem, &rows))
                .collect::<Result<_, _>>()?;
            for (r, row) in rows.iter().enumerate() {
                let shards: Vec<Part> = shards.iter().map(|shard| shard[r].clone()).collect();
                for merged in merge_orders(&shards) {
                    let (merged, whole) = match (merged, &whole[r]) {
                        (Some(merged), Some(whole)) => (merged, whole),
                        (None, None) => continue,
                        _ => return Err(Broken(format!("{name}, row {r}, split {starts:?}: no token on one side"))),
                    };
                    let same = merged.log_z.to_bits() == whole.log_z.to_bits();
                    let close = merged.mass.is_none() && (merged.log_z - whole.log_z).abs() <= LOG_Z_ERROR;
                    ensure!(
                        same || close,
                        "{name}, row {r}, split {starts:?}: log Z {} against {}",
                        merged.log_z,
                        whole.log_z
                    );
                    ensure!(
                        !(pathwise || row.temperature == 0.0) || merged.winners == whole.winners,
                        "{name}, row {r}, split {starts:?}: {:?} against {:?}",
                        merged.winners,
                        whole.winners
                    );
                }
            }
        }
        report.agreed(format!("rows, splits and merge orders, {name}"), rows.len() * splits.len() * 3);
        (trial.progress)((i + 1) as f64 / problems.len() as f64);
    }
    Ok(())
}
