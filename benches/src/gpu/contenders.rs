//! The contenders on a GPU.

use super::clock::{self, Clock};
use super::head::{Calls, OnDevice};
use super::{EXISTING, FP8, FP8_READS, INVERSE, LOG_Z, OURS, PORTABLE, PORTABLE_SHADOW, SHADOW, STANDALONE};
use crate::gpu::read::{Read, ReadKernel, driver, failed};
use crate::rivals::{InverseCdf, Matmul};
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling::DType;
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::{Draw, Row, status};
use flash_sampling::cuda::{
    Device, DeviceDraws, DeviceHead, DeviceMatrix, DeviceStandalone, DeviceTiled, KernelChoice, RowFeatures,
};
use flash_sampling_cli::bench::record::{Entry, Section};
use flash_sampling_cli::bench::table::{BULK, CUBLAS, GREEDY, READ};
use flash_sampling_cli::bench::timing::Contender;
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::input::synthetic::Logits;
use flash_sampling_cli::interrupt::Interrupt;
use std::sync::Arc;

/// The side of the square product that measures the matrix ceiling.
const SQUARE: usize = 8192;

/// All contenders over one head, planned once.
#[derive(Debug)]
pub struct Contenders<'h> {
    head: &'h OnDevice,
    stream: Arc<CudaStream>,
    reads: Vec<(&'static str, Read)>,
    /// `None` if cuBLAS is missing.
    matmul: Option<Matmul>,
    inverse: InverseCdf,
    standalone: DeviceStandalone,
    /// The greedy draw, a draw of each kind of logits, and on request the same from a shadow or a weight in fp8, and draws
    /// of the portable kernel.
    ours: Vec<Ours>,
    /// `[rows, vocab]`, in the type of the weight: the output of the rivals; our kernels do not write it.
    logits: CudaSlice<u8>,
    tokens: CudaSlice<u32>,
    draws: CudaSlice<Draw>,
    existing: Existing,
}

/// Logits in device memory before the call, and our sampler over them.
#[derive(Debug)]
struct Existing {
    /// `[rows, vocab]`, from the peaked hidden states.
    logits: CudaSlice<f32>,
    standalone: DeviceStandalone,
    draws: CudaSlice<Draw>,
}

#[derive(Debug)]
struct Ours {
    name: &'static str,
    states: Logits,
    tiled: DeviceTiled,
    draws: CudaSlice<Draw>,
    /// `[rows, vocab]`, if the logits are stored.
    kept: Option<CudaSlice<f32>>,
    /// One float64 per row, if log Z is requested.
    log_z: Option<CudaSlice<f64>>,
}

impl<'h> Contenders<'h> {
    /// Plans for the head's rows; `portable` adds the portable kernel.
    ///
    /// # Errors
    /// Errors of the backend and the driver.
    pub fn new(
        head: &'h OnDevice,
        portable: bool,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CommandError> {
        let allocate = driver("allocate memory");
        let (weight, most) = (head.weight(), head.rows());
        let mut reads = Vec::new();
        for (name, kernel) in [(READ, ReadKernel::Streaming), (BULK, ReadKernel::Bulk)] {
            reads.extend(Read::new(kernel, device)?.map(|read| (name, read)));
        }
        let matmul = Matmul::new(stream)?;
        let mut ours = Vec::new();
        let mut plan = |name, states, choice, keeps| {
            let shadow = head.shadow().filter(|_| SHADOW.contains(&name) || name == PORTABLE_SHADOW);
            let of_weight = DeviceHead { shadow, ..head.head() };
            let of = head.fp8().filter(|_| FP8.contains(&name)).unwrap_or(of_weight);
            // SAFETY: the weights and the shadow are device memory of this size, which `head` holds and no code writes
            // to.
            let tiled = unsafe { DeviceTiled::with_kernels(of, most, device, choice) };
            let tiled = tiled.map_err(failed)?;
            let draws = stream.alloc_zeros(most).map_err(&allocate)?;
            let kept = if keeps { Some(stream.alloc_zeros(most * weight.rows).map_err(&allocate)?) } else { None };
            let log_z = if name == LOG_Z { Some(stream.alloc_zeros(most).map_err(&allocate)?) } else { None };
            ours.push(Ours { name, states, tiled, draws, kept, log_z });
            Ok::<_, CommandError>(())
        };
        plan(GREEDY, Logits::Peaked, KernelChoice::Fastest, false)?;
        plan(OURS[0], Logits::Gaussian, KernelChoice::Fastest, false)?;
        plan(OURS[1], Logits::Peaked, KernelChoice::Fastest, false)?;
        plan(LOG_Z, Logits::Peaked, KernelChoice::Fastest, false)?;
        if head.shadow().is_some() {
            for (name, states) in SHADOW.into_iter().zip([Logits::Peaked, Logits::Gaussian, Logits::Peaked]) {
                plan(name, states, KernelChoice::Fastest, false)?;
            }
        }
        if head.fp8().is_some() {
            for (name, states) in FP8.into_iter().zip([Logits::Peaked, Logits::Gaussian, Logits::Peaked]) {
                plan(name, states, KernelChoice::Fastest, false)?;
            }
            plan(FP8[3], Logits::Peaked, KernelChoice::Portable, false)?;
        }
        if portable {
            for name in PORTABLE {
                plan(name, Logits::Peaked, KernelChoice::Portable, name == PORTABLE[2])?;
            }
            if head.shadow().is_some() {
                plan(PORTABLE_SHADOW, Logits::Peaked, KernelChoice::Portable, false)?;
            }
        }
        let existing = Existing::new(head, &mut ours[0].tiled, device, stream)?;
        let tokens = 0..weight.rows as u32;
        Ok(Contenders {
            head,
            stream: stream.clone(),
            reads,
            matmul,
            inverse: InverseCdf::new(weight.dtype, most, device)?,
            standalone: DeviceStandalone::new(tokens, weight.dtype, most, device).map_err(failed)?,
            ours,
            logits: stream.alloc_zeros(most * weight.rows * weight.dtype.block_bytes()).map_err(&allocate)?,
            tokens: stream.alloc_zeros(most).map_err(&allocate)?,
            draws: stream.alloc_zeros(most).map_err(&allocate)?,
            existing,
        })
    }

    /// The version of cuBLAS, if it is present.
    pub fn cublas_version(&self) -> Option<i32> {
        self.matmul.as_ref().map(Matmul::version)
    }

    /// Times every contender on the first rows, fills the section, and checks the draws.
    ///
    /// # Errors
    /// A draw that failed, errors of the driver, Ctrl-C.
    pub fn time(
        &mut self,
        section: &mut Section,
        clock: &mut Clock,
        interrupt: &Interrupt,
    ) -> Result<(), CommandError> {
        let (rows, rounds) = (section.rows, section.rounds);
        let mut contenders = self.of(rows, clock::calls(rounds))?;
        let timings = clock.time(&mut contenders, rounds, interrupt)?;
        section.fill(contenders.iter().map(|contender| contender.name.as_str()), &timings);
        drop(contenders);
        self.look(rows)
    }

    /// Times the reads of the whole weight.
    ///
    /// # Errors
    /// Errors of the driver, Ctrl-C.
    pub fn reads(&self, rounds: usize, clock: &mut Clock, interrupt: &Interrupt) -> Result<Vec<Entry>, CommandError> {
        let (weight, stream) = (self.head.weight(), &self.stream);
        let bytes = (weight.rows * weight.cols * weight.dtype.block_bytes()) as u64;
        let mut list = Vec::new();
        for (name, read) in &self.reads {
            list.push(Contender::new(*name, move || {
                // SAFETY: the whole weight, which `head` holds.
                unsafe { read.launch(stream, weight.address.get(), bytes) }
            }));
        }
        if let Some(head) = self.head.fp8() {
            let (address, bytes) = (head.weight.address.get(), bytes / weight.dtype.block_bytes() as u64);
            for (name, (_, read)) in FP8_READS.iter().zip(&self.reads) {
                // SAFETY: the whole weight in fp8, which `head` holds.
                list.push(Contender::new(*name, move || unsafe { read.launch(stream, address, bytes) }));
            }
        }
        let timings = clock.time(&mut list, rounds, interrupt)?;
        Ok(list.iter().zip(timings).map(|(contender, timing)| Entry::new(&*contender.name, timing)).collect())
    }

    fn of(&mut self, rows: usize, calls: usize) -> Result<Vec<Contender<'_>>, CommandError> {
        let (head, stream) = (self.head, &self.stream);
        let weight = head.weight();
        let mut list = Vec::new();
        let peaked = head.states(Logits::Peaked, rows);
        let (address, tokens) =
            (DeviceAddress::of(&self.logits, &self.stream), DeviceAddress::of(&self.tokens, &self.stream));
        let logits = DeviceMatrix { address, dtype: weight.dtype, rows, cols: weight.rows, row_stride: weight.rows };
        if let Some(matmul) = &self.matmul {
            // SAFETY: operands that `head` holds, and memory for `rows` rows of logits.
            let product = move || unsafe { matmul.launch(&weight, &peaked, logits.address.get()) };
            list.push(Contender::new(CUBLAS, product));
            let mut of_standalone = Calls::new(rows, calls, false, &self.stream)?;
            let (standalone, draws) = (&mut self.standalone, DeviceAddress::of(&self.draws, &self.stream));
            list.push(Contender::new(STANDALONE, move || {
                product()?;
                let draws = DeviceDraws { count: rows, rows: of_standalone.advance().0, sources: None, draws };
                // SAFETY: the logits that the product made, the parameters of this call, memory for one draw per row.
                unsafe { standalone.launch(stream, &logits, &draws) }.map_err(failed)
            }));
            // The loads of the inverse CDF need aligned rows, which an odd vocabulary does not have.
            if weight.rows.is_multiple_of(8) {
                let mut calls = Calls::new(rows, calls, false, &self.stream)?;
                let inverse = &mut self.inverse;
                list.push(Contender::new(INVERSE, move || {
                    product()?;
                    // SAFETY: the logits that the product made, the positions of this call, memory for one token per
                    // row.
                    unsafe { inverse.launch(stream, &logits, 1.0, calls.advance().1.get(), tokens.get()) }
                }));
            }
        }
        for ours in &mut self.ours {
            let mut calls = Calls::new(rows, calls, ours.is_greedy(), &self.stream)?;
            list.push(Contender::new(
                ours.name,
                ours.call(head, stream, &self.stream, rows, move || calls.advance().0),
            ));
        }
        let Existing { logits: existing, standalone, draws } = &mut self.existing;
        let (address, draws) =
            (DeviceAddress::of(existing, &self.stream).cast(), DeviceAddress::of(draws, &self.stream));
        let logits = DeviceMatrix { address, dtype: DType::F32, ..logits };
        let mut calls = Calls::new(rows, calls, false, &self.stream)?;
        list.push(Contender::new(EXISTING[0], move || {
            let draws = DeviceDraws { count: rows, rows: calls.advance().0, sources: None, draws };
            // SAFETY: logits that were made beforehand, the parameters of this call, memory for one draw per row.
            unsafe { standalone.launch(stream, &logits, &draws) }.map_err(failed)
        }));
        let (_, read) = &self.reads[0];
        list.push(Contender::new(EXISTING[1], move || {
            // SAFETY: the same logits.
            unsafe { read.launch(stream, logits.address.get(), (rows * logits.cols * size_of::<f32>()) as u64) }
        }));
        Ok(list)
    }

    /// Checks that two contenders, if both are there, made the same draws in their last calls.
    fn check_equal(&self, rows: usize, name: &str, other: &str) -> Result<(), CommandError> {
        let draws = |name| self.ours.iter().find(|ours| ours.name == name).map(|ours| &ours.draws);
        let Some((want, found)) = draws(name).zip(draws(other)) else { return Ok(()) };
        let failed = driver("copy the draws");
        let [want, found] = [want, found].map(|draws| self.stream.clone_dtoh(&draws.slice(..rows)));
        match want.map_err(&failed)?.iter().zip(&found.map_err(&failed)?).position(|(want, found)| want != found) {
            Some(row) => Err(CommandError::usage(format!("{other}: row {row} is not the draw of {name}"))),
            None => Ok(()),
        }
    }

    /// Checks that every row of the last calls was drawn, and is a token of the vocabulary; that a shadow gave the draws of
    /// the weight; and that both kernels gave the same draws of a weight in fp8.
    fn look(&self, rows: usize) -> Result<(), CommandError> {
        let (failed, vocab) = (driver("copy the draws"), self.head.weight().rows as u32);
        let wrong = |name: &str, row| CommandError::usage(format!("{name}: row {row} of the benchmark was not drawn"));
        let draws = self.ours.iter().map(|ours| (ours.name, &ours.draws));
        let rival = self.matmul.as_ref().map(|_| (STANDALONE, &self.draws));
        for (name, draws) in draws.chain(rival).chain([(EXISTING[0], &self.existing.draws)]) {
            let draws = self.stream.clone_dtoh(&draws.slice(..rows)).map_err(&failed)?;
            let bad = draws.iter().position(|draw| draw.status != status::DRAWN || draw.token >= vocab);
            bad.map_or(Ok(()), |row| Err(wrong(name, row)))?;
        }
        let of_weight = [GREEDY, OURS[0], OURS[1], PORTABLE[0]];
        for (name, of_shadow) in of_weight.into_iter().zip(SHADOW.into_iter().chain([PORTABLE_SHADOW])) {
            self.check_equal(rows, name, of_shadow)?;
        }
        self.check_equal(rows, FP8[2], FP8[3])?;
        let tokens = self.stream.clone_dtoh(&self.tokens.slice(..rows)).map_err(&failed)?;
        let bad = tokens.iter().position(|&token| token >= vocab);
        bad.map_or(Ok(()), |row| Err(wrong(INVERSE, row)))
    }

    /// Operations per second of cuBLAS on a square product, with operands from the weight; `None` without cuBLAS or if
    /// the weight is too small.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn matrix_flops(&self, clock: &mut Clock) -> Result<Option<f64>, CommandError> {
        let weight = self.head.weight();
        let side = SQUARE * SQUARE * weight.dtype.block_bytes();
        let Some(matmul) = self.matmul.as_ref().filter(|_| weight.rows * weight.cols >= 2 * SQUARE * SQUARE) else {
            return Ok(None);
        };
        let out: CudaSlice<u8> = self.stream.alloc_zeros(side).map_err(driver("allocate memory"))?;
        let a = DeviceMatrix { rows: SQUARE, cols: SQUARE, row_stride: SQUARE, ..weight };
        let b = DeviceMatrix { address: weight.address.add(side), ..a };
        let to = DeviceAddress::of(&out, &self.stream);
        // SAFETY: both operands are in the weight, which is large enough; `out` has room for the product.
        let product = Contender::new(CUBLAS, move || unsafe { matmul.launch(&a, &b, to.get()) });
        let timing = clock.time(&mut [product], 20, &Interrupt::default())?;
        Ok(Some(2.0 * (SQUARE as f64).powi(3) / timing[0].best))
    }
}

impl Existing {
    /// Makes the logits of all rows by a draw that stores them.
    fn new(
        head: &OnDevice,
        tiled: &mut DeviceTiled,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CommandError> {
        let allocate = driver("allocate memory");
        let (vocab, rows) = (head.weight().rows, head.rows());
        let logits = stream.alloc_zeros(rows * vocab).map_err(&allocate)?;
        let draws = stream.alloc_zeros(rows).map_err(&allocate)?;
        let mut calls = Calls::new(rows, 1, true, stream)?;
        let (to, drawn) = (DeviceAddress::of(&logits, stream), DeviceAddress::of(&draws, stream));
        // SAFETY: hidden states and parameters of these rows, memory for one draw per row and for every logit.
        unsafe {
            let hidden = head.states(Logits::Peaked, rows);
            tiled.launch_storing(stream, &hidden, calls.advance().0, drawn, to, vocab).map_err(failed)?;
        }
        stream.synchronize().map_err(driver("make logits"))?;
        let standalone = DeviceStandalone::new(0..vocab as u32, DType::F32, rows, device).map_err(failed)?;
        Ok(Existing { logits, standalone, draws })
    }
}

impl Ours {
    fn is_greedy(&self) -> bool {
        [GREEDY, PORTABLE[1], SHADOW[0], FP8[0]].contains(&self.name)
    }

    /// Makes a call on the first rows; `next` returns the address of its parameters.
    fn call<'a>(
        &'a mut self,
        head: &'a OnDevice,
        stream: &'a CudaStream,
        owner: &Arc<CudaStream>,
        rows: usize,
        mut next: impl FnMut() -> DeviceAddress<Row> + 'a,
    ) -> impl FnMut() -> Result<(), CommandError> + 'a {
        let hidden = head.states(self.states, rows);
        let draws = DeviceAddress::of(&self.draws, owner);
        let kept = self.kept.as_ref().map(|kept| DeviceAddress::of(kept, owner));
        let log_z = self.log_z.as_ref().map(|log_z| DeviceAddress::of(log_z, owner));
        let (tiled, vocab) = (&mut self.tiled, head.weight().rows);
        move || {
            let rows = next();
            // SAFETY: hidden states, draws, log Z and stored logits of at least `rows` rows, held by `head` and this
            // value; the parameters have the layout of `Calls`; one stream, so launches are sequential.
            unsafe {
                match (kept, log_z) {
                    (None, None) => tiled.launch(stream, &hidden, rows, draws, RowFeatures::Bare),
                    (None, Some(to)) => tiled.launch_with_log_z(stream, &hidden, rows, draws, to, RowFeatures::Bare),
                    (Some(logits), _) => tiled.launch_storing(stream, &hidden, rows, draws, logits, vocab),
                }
            }
            .map_err(failed)
        }
    }
}
