//! What a rank's host does in a call of rows with filters: its share of the surveys not counted, nor waits for the others.
//!
//! ```text
//! cargo run --release -p flash-sampling-distributed --example merge_filters [ROWS]
//! ```
//!
//! Four ranks of a vocabulary of 151936 draw once, with LLM-like logits: 20 likely tokens of 14 nats and less above normal
//! ones. What they exchange is recorded, and the same call is made by one rank alone, again and again, to which the
//! transport gives the record.

use flash_sampling_core::backend::{Batch, Request, RowSummary};
use flash_sampling_core::reference::{Reference, Scheme};
use flash_sampling_core::{
    Capabilities, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Scan, Shape,
};
use flash_sampling_distributed::{Loopback, ShardMerge, ShardSampler, Transport, TransportError};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Instant;
use std::{env, iter, thread};

const VOCAB: usize = 151_936;
const WORLD: usize = 4;
const CALLS: usize = 400;

/// Whether exchanges are made, made and recorded, or taken from the record.
const MADE: u8 = 0;
const RECORDED: u8 = 1;
const REPLAYED: u8 = 2;

/// A shard whose surveys are plain ones, the overviews made once.
struct Told<'a> {
    shape: Shape,
    plan: Plan,
    can: Capabilities,
    logits: &'a [Vec<f32>],
    overviews: Vec<Option<RowSummary>>,
    /// Nanoseconds spent here.
    spent: &'a AtomicU64,
}

impl PerturbedArgmax for Told<'_> {
    fn capabilities(&self) -> Capabilities {
        self.can
    }

    fn shape(&self) -> Shape {
        self.shape.clone()
    }

    fn plan(&self) -> Plan {
        self.plan
    }

    fn sample(&mut self, _: Matrix<'_>, _: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        // Every row has filters.
        out.clear();
        Ok(())
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        Some(self)
    }
}

impl Scan for Told<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        let begun = Instant::now();
        let tokens = self.shape.tokens.clone();
        self.overviews.resize(batch.rows.len(), None);
        for (r, request) in requests.iter().enumerate().filter(|(_, request)| **request != Request::Skip) {
            let row = batch.rows[r].expect("the rows of this program are valid");
            let of = |request| {
                let mut survey = RowSummary::default();
                survey.of(&row, request, tokens.start, &self.logits[r][tokens.start as usize..tokens.end as usize]);
                survey
            };
            out[r] = match request {
                Request::Overview => self.overviews[r].get_or_insert_with(|| of(*request)).clone(),
                _ => of(*request),
            };
        }
        self.spent.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// A transport that can be recorded.
struct Tape<'a> {
    ranks: Loopback,
    mode: &'a AtomicU8,
    record: Vec<Vec<Vec<u8>>>,
    at: usize,
}

impl Transport for Tape<'_> {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn world(&self) -> usize {
        self.ranks.world()
    }

    fn time_limit(&self) -> core::time::Duration {
        self.ranks.time_limit()
    }

    fn set_time_limit(&mut self, limit: core::time::Duration) {
        self.ranks.set_time_limit(limit);
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        let mode = self.mode.load(Ordering::SeqCst);
        if mode == REPLAYED {
            all.clone_from(&self.record[self.at % self.record.len()]);
            self.at += 1;
            return Ok(());
        }
        self.ranks.all_gather(mine, all)?;
        if mode == RECORDED {
            self.record.push(all.clone());
        }
        Ok(())
    }
}

/// A number of 64 well-mixed bits.
fn mixed(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// LLM-like logits of a row.
fn logits(row: u64) -> Vec<f32> {
    let uniform = |i: u64| (mixed(mixed(row + 1) ^ i) >> 11) as f64 / (1u64 << 53) as f64;
    let normal =
        |i: u64| (-2.0 * (1.0 - uniform(2 * i)).ln()).sqrt() * (core::f64::consts::TAU * uniform(2 * i + 1)).cos();
    let mut logits: Vec<f32> = (0..VOCAB as u64).map(|i| 2.0 * normal(i) as f32).collect();
    for i in 0..20 {
        logits[(mixed(mixed(row + 1) ^ !i) % VOCAB as u64) as usize] = 14.0 - 0.35 * i as f32;
    }
    logits
}

/// Microseconds of the fastest call and of the call in the middle, of rank 0.
fn measure(params: &RowParams<'_>, logits: &[Vec<f32>]) -> (f64, f64) {
    let rows = logits.len();
    let weight = vec![0.0f32; VOCAB];
    let head = Head::new(Matrix::new(&weight, VOCAB, 1).expect("its size")).expect("a head");
    let plan = Plan { max_rows: rows, ..Plan::default() };
    let can = Reference::new(head, plan, Scheme::Tiled).capabilities();
    let (mode, input) = (AtomicU8::new(MADE), vec![1.0f32; rows]);
    let input = Matrix::new(&input, rows, 1).expect("its size");
    let params: Vec<_> = (0..rows).map(|seed| RowParams { seed: seed as u64, ..*params }).collect();
    let spent: Vec<_> = iter::repeat_with(|| AtomicU64::new(0)).take(WORLD).collect();
    let start = |rank: usize| (VOCAB * rank / WORLD) as u32;
    let rank = |ranks: Loopback| {
        let (own, spent) = (ranks.rank(), &spent[ranks.rank()]);
        let shape = Shape { tokens: start(own)..start(own + 1), vocab_size: VOCAB as u32, input: 1 };
        let told = Told { shape, plan, can, logits, overviews: Vec::new(), spent };
        let tape = Tape { ranks, mode: &mode, record: Vec::new(), at: 0 };
        let mut sampler = ShardSampler::new(Box::new(told), tape, ShardMerge::Winners).expect("ranks that meet");
        mode.store(RECORDED, Ordering::SeqCst);
        let mut out = Samples::new();
        sampler.sample(input, &params, &mut out).expect("a call");
        (sampler, out)
    };
    thread::scope(|scope| {
        let mut group = Loopback::group(WORLD).into_iter();
        let first = group.next().expect("the first rank");
        let others: Vec<_> = group.map(|ranks| scope.spawn(|| drop(rank(ranks)))).collect();
        let (mut sampler, mut out) = rank(first);
        others.into_iter().for_each(|thread| thread.join().expect("a rank"));
        mode.store(REPLAYED, Ordering::SeqCst);
        let call = |_| {
            let (begun, before) = (Instant::now(), spent[0].load(Ordering::Relaxed));
            sampler.sample(input, &params, &mut out).expect("the call of the record");
            let surveys = spent[0].load(Ordering::Relaxed) - before;
            begun.elapsed().as_secs_f64() * 1e6 - surveys as f64 * 1e-3
        };
        let mut times: Vec<_> = (0..CALLS).map(call).collect();
        times.sort_by(f64::total_cmp);
        (times[0], times[CALLS / 2])
    })
}

fn main() {
    let rows = env::args().nth(1).and_then(|rows| rows.parse().ok()).unwrap_or(64);
    let logits: Vec<_> = (0..rows).map(logits).collect();
    let base = RowParams::default();
    println!("{rows} rows of {VOCAB}, {WORLD} ranks: microseconds of a rank's host, least and median of {CALLS} calls");
    for (name, params) in [
        ("min-p 0.05", RowParams { min_p: 0.05, ..base }),
        ("top-k 20", RowParams { top_k: 20, ..base }),
        ("top-k 50 + top-p 0.9", RowParams { top_k: 50, top_p: 0.9, ..base }),
        ("top-p 0.95", RowParams { top_p: 0.95, ..base }),
    ] {
        let (least, median) = measure(&params, &logits);
        println!("{name:24}{least:8.0}{median:8.0}");
    }
}
