//! What the samplers over host memory share: checks, staging, launches, and results as core says them.

use crate::abi::{Draw, status};
use crate::device::Device;
use crate::device_tiled::KernelChoice;
use crate::error::CudaError;
use crate::resident::Resident;
use crate::staging::Staging;
use cudarc::driver::CudaStream;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Candidate, Capabilities, Head, Knob, MassHistogram, Matrix, Plan, RowError, RowParams, SampleError, Samples, Shape,
    TopList, Winner,
};
use std::sync::Arc;

/// A call from host memory to host memory, whatever the variant: the public samplers are this, with what they can do.
#[derive(Debug)]
pub(crate) struct Frame<'w> {
    head: Head<'w>,
    plan: Plan,
    can: Capabilities,
    stream: Arc<CudaStream>,
    /// `None` for a head without tokens.
    resident: Option<Resident>,
    staging: Staging,
    /// Row and number of each draw of the call.
    work: Vec<(usize, u32)>,
    /// The draws of the last launches, and of the call.
    draws: Vec<Draw>,
    results: Vec<Draw>,
    /// The logits of a row, and for each row that asked: its number, its masses and its largest logits.
    logits: Vec<f32>,
    asked: Vec<(usize, MassHistogram, TopList)>,
}

impl<'w> Frame<'w> {
    /// Checks the plan, copies the weight, compiles and loads the kernels.
    pub(crate) fn new(
        head: Head<'w>,
        plan: Plan,
        can: Capabilities,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        if plan.canonical && !can.canonical {
            return Err(CudaError::Unsupported { knob: Knob::Canonical });
        }
        let empty = [(plan.max_rows == 0, Knob::MaxRows), (plan.max_draws == 0, Knob::Draws)];
        if let Some(&(_, knob)) = empty.iter().find(|(empty, _)| *empty) {
            return Err(CudaError::EmptyPlan { knob });
        }
        let stream = device.stream()?;
        let resident = match head.tokens().is_empty() {
            true => None,
            false => Some(Resident::new(&head, &plan, device, choice, &stream)?),
        };
        Ok(Frame {
            head,
            plan,
            can,
            stream,
            resident,
            staging: Staging::default(),
            work: Vec::new(),
            draws: Vec::new(),
            results: Vec::new(),
            logits: Vec::new(),
            asked: Vec::new(),
        })
    }

    /// Makes every draw of `work`, in its order, and evaluates the rows that ask for log-probabilities.
    fn draw(&mut self, input: &Matrix<'_>, rows: &[RowParams<'_>]) -> Result<(), CudaError> {
        self.results.clear();
        self.asked.clear();
        let (can, vocab_size) = (self.can, self.head.vocab_size());
        let Some(resident) = &mut self.resident else {
            let nothing = Draw { status: status::NO_FINITE_LOGIT, ..Draw::default() };
            self.results.resize(self.work.len(), nothing);
            return Ok(());
        };
        for part in self.work.chunks(resident.most()) {
            self.staging.clear();
            let mut checked = None;
            for &(r, draw) in part {
                let row = match checked {
                    Some((checked_row, row)) if checked_row == r => row,
                    _ => rows[r].check(&can, &self.plan, vocab_size).expect("rows of the work were checked"),
                };
                checked = Some((r, row));
                self.staging.push_hidden(input.row_bytes(r), resident.row_stride() * input.dtype().size());
                self.staging.push(rows[r].seed, rows[r].position, &row, draw, vocab_size);
            }
            resident.draw(&mut self.staging, input, &mut self.draws, &self.stream)?;
            self.results.extend_from_slice(&self.draws);
            for (i, &(r, draw)) in part.iter().enumerate() {
                let Some(most) = rows[r].logprobs else { continue };
                if draw == rows[r].first_draw && self.draws[i].status == status::DRAWN {
                    resident.logits(i, &mut self.logits, &self.stream)?;
                    self.asked.push(summary(r, most, self.head.tokens().start, &self.logits));
                }
            }
        }
        Ok(())
    }
}

/// Masses and largest logits of row `r`; `logits[i]` belongs to token `first + i`.
fn summary(r: usize, most: u32, first: u32, logits: &[f32]) -> (usize, MassHistogram, TopList) {
    let (mut mass, mut top) = (MassHistogram::default(), TopList::new(most as usize, 0.0));
    mass.extend_from_slice(logits);
    for (token, &logit) in (first..).zip(logits).filter(|(_, logit)| **logit > f32::NEG_INFINITY) {
        top.push(Candidate { winner: Winner::new(logit, token), logit });
    }
    (r, mass, top)
}

/// The row's result of the kernel, as core says it.
fn candidate(draw: &Draw) -> Result<Candidate, RowError> {
    match draw.status {
        status::DRAWN => Ok(Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit }),
        status::NAN => Err(RowError::NaN { token: draw.token }),
        status::POSITIVE_INFINITY => Err(RowError::PositiveInfinity { token: draw.token }),
        _ => Err(RowError::NoFiniteLogit),
    }
}

impl Frame<'_> {
    pub(crate) fn capabilities(&self) -> Capabilities {
        self.can
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape { tokens: self.head.tokens(), vocab_size: self.head.vocab_size(), input: self.head.hidden() }
    }

    pub(crate) fn plan(&self) -> Plan {
        self.plan
    }

    pub(crate) fn sample(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        check_call(&input, rows, &self.shape(), &self.plan)?;
        out.clear();
        let (can, vocab_size) = (self.can, self.head.vocab_size());
        self.work.clear();
        for (r, params) in rows.iter().enumerate() {
            if let Ok(row) = params.check(&can, &self.plan, vocab_size) {
                self.work.extend((row.first_draw..row.first_draw + row.draws).map(|draw| (r, draw)));
            }
        }
        let failed = |error| SampleError::Backend { backend: "cuda", source: Box::new(error) };
        self.draw(&input, rows).map_err(failed)?;
        let (mut results, mut asked) = (self.results.as_slice(), self.asked.iter().peekable());
        for (r, params) in rows.iter().enumerate() {
            let extra = asked.next_if(|(row, ..)| *row == r);
            let outcome = params.check(&can, &self.plan, vocab_size).and_then(|row| {
                let (draws, rest) = results.split_at(row.draws as usize);
                results = rest;
                draws.iter().try_for_each(|draw| candidate(draw).map(drop))?;
                let (mass, top) = extra.map_or((None, [].as_slice()), |(_, mass, top)| (Some(mass), top.as_slice()));
                out.push_row(draws.iter().flat_map(candidate), mass, top);
                Ok(())
            });
            if let Err(error) = outcome {
                out.push_error(error);
            }
        }
        Ok(())
    }
}
