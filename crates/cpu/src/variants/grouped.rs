//! The parallel-group variant (paper Alg. I.2).

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::scan::row_groups::RowGroups;
use crate::scan::tile::{Planned, Worker};
use crate::simd::SPAN;
use crate::variants::tiled::HeadScan;
use flash_sampling_core::backend::{Batch, Driver, Request, RowSummary, Scan, check_call};
use flash_sampling_core::{
    Description, Exactness, Head, Knob, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Variant,
};

/// The parallel-group sampler: a log-mass and a local sample per group, then a draw of the group (paper Alg. I.2).
/// Exact in distribution.
///
/// Groups are on the absolute grid of multiples of their size, so they are the same in every shard.
#[derive(Debug)]
pub struct Grouped<'w> {
    scan: HeadScan<'w>,
    driver: Driver,
}

impl<'w> Grouped<'w> {
    /// Plans a sampler with groups of `group` tokens.
    ///
    /// # Errors
    /// * [`CpuError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CpuError::Unsupported`]: [`Plan::canonical`] since this variant is not pathwise.
    /// * Errors of [`Tiled::new`](crate::Tiled::new).
    pub fn new(head: Head<'w>, plan: Plan, group: u32, options: &CpuOptions) -> Result<Self, CpuError> {
        check_group(group)?;
        if plan.canonical {
            return Err(CpuError::Unsupported { knob: Knob::Canonical });
        }
        let mut scan = HeadScan::new(head, plan, options, true)?;
        scan.chunk = group;
        let mut grouped = Grouped { scan, driver: Driver::default() };
        grouped.make_groups();
        Ok(grouped)
    }

    /// Creates the states of the groups, one per row.
    fn make_groups(&mut self) {
        let plan = self.scan.engine.plan;
        for worker in &mut self.scan.engine.workers {
            worker.groups = (0..plan.max_rows).map(|_| RowGroups::new(&plan)).collect();
        }
    }
}

/// Checks that a group is a whole number of noise spans.
pub(crate) fn check_group(size: u32) -> Result<(), CpuError> {
    if size == 0 || !size.is_multiple_of(SPAN as u32) { Err(CpuError::GroupSize { size }) } else { Ok(()) }
}

impl PerturbedArgmax for Grouped<'_> {
    fn description(&self) -> Description {
        self.scan.description(Variant::Grouped, Exactness::InDistribution)
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let of = self.description();
        check_call(&input, rows, &of.shape, &of.plan)?;
        self.driver.sample(&mut GroupScan(&mut self.scan), &of, input, rows, out)
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.scan.replan(max_rows)?;
        self.make_groups();
        Ok(())
    }
}

/// A scan that draws a group by its log-mass, and takes the group's draws.
struct GroupScan<'s, 'w>(&'s mut HeadScan<'w>);

impl Scan for GroupScan<'_, '_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        let HeadScan { engine, logits, chunk: group } = &mut *self.0;
        if !requests.iter().any(Request::is_overview) {
            // Raw logits.
            return self.0.scan(batch, requests, out);
        }
        let dot = logits.hidden.pack(engine.isa, logits.head.weight().dtype(), &batch.input);
        let adjustments = engine.adjustments(batch.params);
        let mut rows = engine.take_rows();
        let planned = |(r, row)| Result::map(row, |row| Planned::new(&row, r, &adjustments));
        rows.extend(batch.rows.iter().copied().enumerate().map(planned));
        let active = |r: usize| rows[r].as_ref().ok().map(|planned| planned.row);
        let begin = |worker: &mut Worker| {
            for (r, groups) in worker.groups[..rows.len()].iter_mut().enumerate() {
                if let Some(row) = active(r) {
                    groups.begin(&row);
                }
            }
        };
        let source = logits.packed(dot);
        engine.for_parts(logits.head.tokens(), *group, begin, |worker, tokens, simd| {
            worker.begin(&rows, None, false);
            worker.evaluate(&source, &rows, tokens.clone(), simd);
            let k = tokens.start / *group;
            for (r, (groups, state)) in worker.groups.iter_mut().zip(&worker.rows).enumerate().take(rows.len()) {
                if let Some(row) = active(r) {
                    groups.add(&row, k, state);
                }
            }
        });
        let Some((first, others)) = engine.workers.split_first_mut() else { return Ok(()) };
        for (r, summary) in out.iter_mut().enumerate().take(rows.len()) {
            let Some(row) = active(r) else { continue };
            let groups = &mut first.groups[r];
            others.iter().for_each(|other| groups.merge(&other.groups[r]));
            summary.begin(&row);
            groups.summary().write(&row, summary);
            if let Some((mass, top)) = groups.raw.kept() {
                summary.raw_mass.get_or_insert_default().clone_from(mass);
                summary.raw_top.merge(top);
            }
        }
        engine.end(rows);
        engine.keep(adjustments);
        Ok(())
    }
}
