//! Times whole calls over device memory by the host's clock.
//!
//! A call uploads parameters, makes the second pass of undecided rows, and downloads draws. Events around one pass do
//! not include these.

use super::cases::{Case, Lists, MOST_LOGPROBS, draw, with_passes};
use crate::gpu::read::failed;
use cudarc::driver::CudaStream;
use flash_sampling::cuda::{Device, DeviceHead, DeviceMatrix, DeviceSampler};
use flash_sampling::{Plan, RowParams, Samples};
use flash_sampling_cli::bench::record::{Passes, Section};
use flash_sampling_cli::bench::timing::Contender;
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// The maximum of calls of each case.
const CALLS: usize = 20;

/// The cases in which one pass left most rows undecided. With few undecided rows, the second pass has few rows or none,
/// and the time of whole calls shows little about it.
pub fn undecided(section: &Section) -> Vec<Case> {
    let passes = |case: &Case| section.entry(case.name())?.passes;
    Case::ALL.into_iter().filter(|case| passes(case).is_some_and(Passes::is_mostly_undecided)).collect()
}

/// Times whole calls of the plain draw and of `cases` in turn, and counts the passes of their rows. `section` is the
/// section of one pass, without entries.
///
/// # Errors
/// Errors of the backend, Ctrl-C.
pub fn time(
    section: Section,
    (cases, lists): (&[Case], &Lists),
    (weight, hidden): (DeviceMatrix, &DeviceMatrix),
    (device, stream): (&Arc<Device>, &Arc<CudaStream>),
    interrupt: &Interrupt,
) -> Result<Section, CommandError> {
    let plan = Plan { max_rows: hidden.rows, max_logprobs: Some(MOST_LOGPROBS), ..Plan::default() };
    let head = DeviceHead::of(weight);
    // SAFETY: the weight is device memory of this size, which the caller holds and no code writes to.
    let sampler = unsafe { DeviceSampler::new(head, weight.rows as u32, plan, device) }.map_err(failed)?;
    let sampler = RefCell::new(sampler);
    let (mut contenders, mut passes) = (Vec::new(), Vec::new());
    for &case in [Case::Plain].iter().chain(cases) {
        let sample = |params: &[RowParams<'_>], out: &mut Samples| {
            // SAFETY: the hidden states are device memory of this size, held by the caller, and no capture of the
            // stream is in progress.
            unsafe { sampler.borrow_mut().sample(stream, hidden, params, out) }
        };
        let of_case = Rc::new(Cell::default());
        passes.push(of_case.clone());
        contenders.push(Contender::new(case.name(), draw(case, lists, hidden.rows, sample, of_case)));
    }
    let what = format!("whole calls by the host's clock, by turns: {}", section.what);
    let section = Section { what, rounds: section.rounds.min(CALLS), ..section };
    Ok(with_passes(flash_sampling_cli::bench::time(section, contenders, interrupt)?, &passes))
}
