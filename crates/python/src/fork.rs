//! Refuses calls in a forked child process that need threads of its parent: a fork does not copy threads.

use crate::error::invalid;
use flash_sampling::{Backend, BackendConfig};
use pyo3::prelude::*;
use std::process::id;
use std::sync::OnceLock;

/// The process whose threads a sampler uses.
#[derive(Clone, Copy)]
pub(crate) struct ThreadProcess(Option<u32>);

impl ThreadProcess {
    /// No process: the sampler uses no worker threads, for example on a GPU.
    pub(crate) const NONE: ThreadProcess = ThreadProcess(None);

    /// The process of the shared thread pool: this process, if no sampler has used the pool yet.
    fn of_pool() -> ThreadProcess {
        static POOL: OnceLock<u32> = OnceLock::new();
        ThreadProcess(Some(*POOL.get_or_init(id)))
    }

    /// The process for a new sampler.
    ///
    /// # Errors
    /// The sampler needs the shared thread pool, and this process is a forked child of the pool's process.
    pub(crate) fn of_sampler(config: &BackendConfig) -> PyResult<ThreadProcess> {
        // The shared pool makes the shadow.
        if config.shadow {
            ThreadProcess::of_pool().check()?;
        }
        let process = match &config.backend {
            Backend::Cpu(options) if options.threads == Some(1) => ThreadProcess::NONE,
            Backend::Cpu(options) if options.threads.is_some() => ThreadProcess(Some(id())),
            Backend::Cpu(_) => ThreadProcess::of_pool(),
            _ => ThreadProcess::NONE,
        };
        process.check().map(|()| process)
    }

    /// Refuses threads of another process, because a call would wait for these threads forever.
    pub(crate) fn check(self) -> PyResult<()> {
        match self.0 {
            Some(process) if process != id() => {
                let text = "this process was forked, and the threads exist only in its parent";
                Err(invalid("threads", format!("{text}: use the start method \"spawn\", or threads=1")))
            }
            _ => Ok(()),
        }
    }
}
